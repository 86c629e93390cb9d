"""One GPU: decode and prefill beside what the device can do, idle time, kernels, the start.

    scripts/bench/run gpu [--json FILE] [--minutes 9.5] [--only PART ...]
    scripts/bench/run gpu --device cpu --tiny

Weights are made up, in the shapes of Llama-3.1-8B and Qwen3-0.6B. What the device can do is measured in the same run: a
copy, and a bfloat16 product. With --tiny it only shows that the program works.

A part is a process of its own with a time limit, since a process whose kernel failed can no longer use the GPU. Each
figure is in FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent
MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
HEADS = {"Llama-3.1-8B": "32 8 128", "Qwen3-0.6B": "16 8 128", "tiny": "4 2 16"}
SMALL_PRODUCT = {"Llama-3.1-8B": "4096 1024", "tiny": "16 128"}
FAILED = "failed"


def parts(models: tuple[str, ...]) -> dict[str, tuple[list[str], int]]:
    """The command of each part, and its limit in seconds; the first parts matter most."""
    measure = str(DIRECTORY / "on_gpu" / "measure.py")
    attention, kernels = str(DIRECTORY / "gpu_attention.py"), str(DIRECTORY / "gpu_kernels.py")
    first = models[0]
    rows, columns = SMALL_PRODUCT[first].split()
    small = ["--only", "linear", "--rows", rows, "--columns", columns]
    return {
        "limits": ([measure, "limits"], 60),
        "agreement": ([measure, "agreement"], 180),
        **{name: ([measure, "model", name], 180) for name in models},
        "attention": ([attention, "--json", "--heads", *HEADS[first].split()], 90),
        **{f"{name}, served": ([measure, "served", name], 90) for name in models},
        "kernels": ([kernels, "--json"], 150),
        "small products": ([kernels, "--json", *small], 90),
    }


def run_part(command: list[str], seconds: float, found: dict[str, Any], save: Any) -> None:
    """Run a part, and keep what it says line by line: objects, named by their `case`."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # It may have children, which are to end with it.
            start_new_session=True,
        )

        def kill() -> None:
            found[FAILED] = f"no end after {seconds:.0f} s"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            try:
                case = json.loads(line)
                found[case.pop("case")] = case
            except (ValueError, KeyError, AttributeError):
                print(line, end="", flush=True)
            save()
        status = process.wait()
        timer.cancel()
        errors.seek(0)
        said = errors.read()
        print(said[-3000:], end="", file=sys.stderr, flush=True)
        if status and FAILED not in found:
            found[FAILED] = f"ended with {status}: {said[-1500:]}"


def lines(report: Any, indent: str = "") -> list[str]:
    found = []
    for name, value in report.items():
        if isinstance(value, dict):
            found += [f"{indent}{name}", *lines(value, indent + "  ")]
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            found.append(f"{indent}{name:{30 - len(indent)}s} {shown}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a toy model")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    known = parts(("tiny",) if arguments.tiny else MODELS)
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"--only {unknown.pop()!r}: the parts are {', '.join(known)}")
    end = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {}

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(report))

    for name, (command, seconds) in known.items():
        if arguments.only and name not in arguments.only:
            continue
        found = report[name] = {}
        left = end - time.monotonic()
        if left < 5:
            found[FAILED] = "no time was left"
            continue
        print(f"{name} …", flush=True)
        began = time.monotonic()
        options = []
        if command[0].endswith("measure.py"):
            limits = report.get("limits", {})
            options = ["--device", arguments.device, "--limits", json.dumps(limits)]
            options += ["--tiny"] * arguments.tiny
        run_part([*command, *options], min(seconds, left), found, save)
        save()
        print(f"  {time.monotonic() - began:.1f} s", flush=True)
        print("\n".join(lines(found, "  ")), flush=True)


if __name__ == "__main__":
    main()
