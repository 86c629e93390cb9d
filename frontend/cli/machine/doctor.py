"""The command `engine doctor`: show what this machine can serve, how fast, and what is misconfigured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from .... import __version__
from ....protocol.checkpoint.files import find_safetensors
from ....protocol.errors import EngineError
from ....protocol.machine.memory import available_bytes, total_bytes
from ...supervisor.console import format_bytes, reports_errors
from ..parsers import add_switch, command_parser
from .caches import find_cached
from .checks import Check, run_checks

KV_SHARE: Final = 0.2
"""Share of the memory that is reserved for the KV cache and for processes."""
BITS: Final = {"4-bit": 4.5, "8-bit": 8.5, "bfloat16": 16.0}
"""Bits per weight of the usual quantizations, including their scales."""
PROBE_TIMEOUT_S: Final = 300.0


class FittingModel(msgspec.Struct):
    """A model on this machine, and whether it can be served.

    Attributes:
        name: Its name.
        weight_bytes: Size of its weights.
        fits: True if they fit in the memory that is free now.
        tokens_s: Expected tokens per second of one stream, assuming that each token reads all weights at the measured
            memory bandwidth. Mixture-of-experts models and speculative decoding are faster than that.
    """

    name: str
    weight_bytes: int
    fits: bool
    tokens_s: float


class Diagnosis(msgspec.Struct):
    """The findings of `engine doctor`. Sizes are in bytes, and the bandwidth is in bytes per second."""

    version: str
    system: str
    processor: str
    cores: int
    instruction_set: str | None
    native_error: str | None
    torch: str
    gpus: list[dict[str, Any]]
    total_bytes: int
    available_bytes: int
    bandwidth: float
    largest_parameters: dict[str, float]
    models: list[FittingModel]
    checks: list[Check]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine doctor`."""
    parser = command_parser(
        "doctor",
        "Describe this machine: its kernels, its memory bandwidth, which models fit and "
        "how fast they will be, and settings that make servers slow. Exits with 1 if "
        "there is something to fix.",
    )
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", help="Further model files or directories to estimate"
    )
    add_switch(parser, "--json", "Print JSON")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the diagnosis. Return 0 if all settings are good, otherwise 1."""
    parsed = make_parser().parse_args(argv)
    diagnosis = diagnose(parsed.models)
    if parsed.json:
        print(json.dumps(msgspec.to_builtins(diagnosis)))
    else:
        print(format_diagnosis(diagnosis))
    is_good = diagnosis.native_error is None and all(check.is_good for check in diagnosis.checks)
    return 0 if is_good else 1


def diagnose(paths: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of this machine.

    Args:
        paths: Models that are not in a cache.

    Raises:
        EngineError: A path does not exist, or the workers' program fails.
    """
    sizes = {model.name: model.weight_bytes for model in find_cached() if model.weight_bytes}
    sizes |= {path: _size_of(Path(path)) for path in paths}
    machine = _describe_machine()
    # On a GPU, weights and KV cache must fit in the GPU's own memory.
    gpus = machine["gpus"]
    room = sum(gpu["free_bytes"] for gpu in gpus) if gpus else available_bytes()
    bandwidth = gpus[0]["bandwidth"] if gpus else machine["bandwidth"]
    largest = room * (1 - KV_SHARE)
    models = [
        FittingModel(name, size, size <= largest, bandwidth / size) for name, size in sizes.items()
    ]
    return Diagnosis(
        __version__,
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        _processor_name(),
        machine["cores"],
        machine["instruction_set"],
        machine["native_error"],
        machine["torch"],
        gpus,
        total_bytes(),
        available_bytes(),
        machine["bandwidth"],
        {name: largest * 8 / bits for name, bits in BITS.items()},
        models,
        list(run_checks()),
    )


def _describe_machine() -> dict[str, Any]:
    """Return the description that a worker program gives of the machine. Only workers may import torch."""
    command = [sys.executable, "-P", "-m", "engine.workers.execution.describe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"the probe did not finish within {PROBE_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"the probe exited with code {done.returncode}: {last}")
    machine: dict[str, Any] = json.loads(done.stdout)
    return machine


def _size_of(path: Path) -> int:
    """Return the size of a model's weights in bytes: of a file, or of all weight files in a directory."""
    files = [path] if path.is_file() else find_safetensors(path) or [*path.glob("*.gguf")]
    if not files or not path.exists():
        raise EngineError(
            f"{path}: is neither a file nor a directory with .safetensors or .gguf files"
        )
    return sum(file.stat().st_size for file in files)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text for one screen."""
    d = diagnosis
    kernels = d.instruction_set or "none"
    rows = [
        ("engine", f"{d.version}, torch {d.torch}"),
        ("system", d.system),
        ("processor", f"{d.processor}, {d.cores} of {os.cpu_count()} processors usable"),
        ("kernels", kernels if d.native_error is None else f"{kernels}: {d.native_error}"),
        *(
            (
                "GPU",
                f"{gpu['name']}, {_free_of_total(gpu['free_bytes'], gpu['total_bytes'])}, "
                f"read at {format_bytes(gpu['bandwidth'])}/s",
            )
            for gpu in d.gpus
        ),
        (
            "memory",
            f"{_free_of_total(d.available_bytes, d.total_bytes)}, read at {format_bytes(d.bandwidth)}/s",
        ),
        (
            "room for",
            ", ".join(
                f"{count / 1e9:.1f} billion parameters in {name}"
                for name, count in d.largest_parameters.items()
            ),
        ),
    ]
    lines = [f"{name:<16}{value}" for name, value in rows]
    lines += ["", f"{'MODEL':<44}{'SIZE':>10}  {'FITS':<5}  ONE STREAM"]
    for model in d.models:
        fits = "yes" if model.fits else "no"
        size = format_bytes(model.weight_bytes)
        lines.append(f"{model.name:<44}{size:>10}  {fits:<5}  about {model.tokens_s:,.1f} tokens/s")
    lines.append("")
    for check in d.checks:
        mark = "ok  " if check.is_good else "BAD "
        lines.append(f"{mark}{check.name:<16}{check.value}")
        if check.advice:
            lines.append(f"    {'':<16}{check.advice}")
    return "\n".join(lines)


def _free_of_total(free: float, total: float) -> str:
    return f"{format_bytes(free)} of {format_bytes(total)} free"
