"""Measure one GPU: agreement with a CPU, decode and prefill compared with the device's limits, kernels, start-up.

    scripts/bench/run gpu [--call A B C D E] [--json FILE] [--only PART ...]
    scripts/bench/run gpu --only kernels "small products" "prefill tiles"
    scripts/bench/run gpu --device cpu --tiny

Call A checks whether the results are right, call B measures the speed, call C finds out what limits it, call D checks
every family of models, and call E measures a mixture of experts and checks every kind of request; `on_gpu/plan.py`
lists their parts. On a machine without a network, use `scripts/bench/on_gpu/first.sh` instead.

The weights are random, with the shapes of Llama-3.1-8B, Qwen3-0.6B and Qwen3-30B-A3B. The limits of the device are
measured in the same run, with a copy and a bfloat16 product. The served part writes a checkpoint of 16 GB to the folder
for temporary files (TMPDIR). With --tiny, the run only shows that the program works.

Each part runs in its own process with a time limit, and the first parts of a call matter most. A process whose kernel
failed can no longer use the GPU, so another process continues with the rest of its part. Comparisons with the CPU that
failed are repeated once without graphs, waiting for each launch. Measurements that do not fit into the memory or need a
missing program are skipped. The first part lists missing modules. If any is missing, only the parts that --only names
are started.

Each figure is written to FILE as soon as it is known. A file next to it, which ends in .log, has all error output of
the parts. At the end come the figures that have targets, and the failures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from on_gpu.plan import EXPERTS, IMPORTS, LIMITS, MODELS, Part, plan
from on_gpu.reporting import FAILED, SKIPPED

GOALS = {
    "same_tokens": "1 in float32, as of plain torch on a CPU",
    "num_different": "repeats with other bits: 0",
    "errors": "that compute-sanitizer found: 0",
    "logprobs_apart": "small",
    "of_roofline": "at least 0.78 for 1 request, 0.75 for 64 x 1k, 0.7 for 256 x 2k",
    "over_greedy": "of sampling, at most 1.03",
    "of_parts": "a mixed step beside the sum of its parts, at most 1.15",
    "of_matmul": "at least 0.75",
    "host_us": "the host's part of a step, below its time on the device",
    "drift": "of the first measurement, repeated at the end; above 0.02 the call does not count",
    "idle between steps": "at most 0.02 for 64 requests",
    "idle": "with what is between the kernels of a step",
    "count": "times the host waits for the device: 0",
    "of_torch": "at least 0.9, more than 1 for decodes",
    "s": "to be ready, at most 15 with weights",
}
"""Figures that are repeated at the end, with their targets."""

SHORTEST = 5
"""Seconds that must remain for another process to be started."""


def run_part(
    command: list[str],
    seconds: float,
    found: dict[str, Any],
    save: Callable[[], None],
    log: Path,
) -> None:
    """Run a part, and collect the JSON objects that it prints, one per line, by their `case`.

    If it fails, another process continues with the rest, as long as that yields new figures.
    """
    end = time.monotonic() + seconds
    while True:
        num_found = len(found)
        done = ["--done", *found] if found else []
        reason = run_once([*command, *done], end - time.monotonic(), found, save, log)
        if reason is None:
            return
        if len(found) == num_found or end - time.monotonic() < SHORTEST:
            found[FAILED] = reason
            return


def run_once(
    command: list[str],
    seconds: float,
    found: dict[str, Any],
    save: Callable[[], None],
    log: Path,
) -> str | None:
    """Run a part once. Return the reason if it failed."""
    with log.open("a") as errors:
        begin = errors.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Start it in its own process group, because it may have children, which must exit with it.
            start_new_session=True,
            # Make it print its stack on a fatal signal, its own or ours.
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
        reasons = []

        def kill() -> None:
            reasons.append(f"no end after {seconds:.0f} s")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGABRT)
                time.sleep(2)
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if not keep(line, found):
                print(line, end="", flush=True)
            save()
        status = process.wait()
        timer.cancel()
        # Its children may still be running.
        timer.join()
    said = log.read_bytes()[begin:].decode(errors="replace")
    print(said[-2000:], end="", file=sys.stderr, flush=True)
    if status and not reasons:
        last = said.strip().rpartition("\n")[2]
        reasons.append(f"ended with {status}: {last[:400]}")
    return reasons[0] if reasons else None


def keep(line: str, found: dict[str, Any]) -> bool:
    """Store the line if it is a figure. Return whether it is one."""
    try:
        case = json.loads(line)
    except ValueError:
        return False
    if not isinstance(case, dict) or "case" not in case:
        return False
    found[case.pop("case")] = case
    return True


def lines(report: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Return one line for each object without nested objects."""
    for name, value in report.items():
        if not isinstance(value, dict):
            yield f"{indent}{name:{30 - len(indent)}s} {shown(value)}"
        elif any(isinstance(inner, (dict, list)) for inner in value.values()):
            yield f"{indent}{name}"
            yield from lines(value, indent + "  ")
        else:
            figures = "  ".join(f"{key} {shown(inner)}" for key, inner in value.items())
            yield f"{indent}{name:{30 - len(indent)}s} {figures}"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(report: dict[str, Any]) -> Iterator[str]:
    """Return the figures that have targets, and the failures."""
    cases = [
        (f"{part}, {case}", figures)
        for part, found in report.items()
        for case, figures in found.items()
        if isinstance(figures, dict)
    ]
    for key, goal in GOALS.items():
        reached = [f"  {name:44s} {shown(x[key])}" for name, x in cases if x.get(key) is not None]
        if reached:
            yield f"{key} ({goal})"
            yield from reached
    for name, figures in cases:
        if SKIPPED in figures:
            yield f"skipped {name}: {figures[SKIPPED][:200]}"
    for name, figures in cases:
        if FAILED in figures:
            yield f"FAILED {name}: {figures[FAILED][:200]}"
    for part, found in report.items():
        if FAILED in found:
            yield f"FAILED {part}: {found[FAILED]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run only a few steps of a tiny model")
    parser.add_argument("--call", nargs="+", choices=tuple("ABCDE"), default=("A", "B", "C"))
    parser.add_argument("--minutes", type=float, default=27, help="total minutes for all parts")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    calls = plan(("tiny",) if arguments.tiny else MODELS)
    known = {name: part for call in calls.values() for name, part in call.items()}
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"--only {unknown.pop()!r}: the parts are {', '.join(known)}")
    wanted = set(arguments.only or (name for call in arguments.call for name in calls[call]))
    if wanted & {"again", "tiny", *MODELS, *EXPERTS.values()}:
        wanted.add(LIMITS)
    # An aborted process must not write a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as name:
        figures = arguments.json or Path(name, "figures.json")
        chosen = {name: part for name, part in known.items() if name in wanted}
        report = measure(arguments, chosen, figures)
    print("\n".join(["", *summary(report)]), flush=True)


def measure(arguments: argparse.Namespace, parts: dict[str, Part], figures: Path) -> dict[str, Any]:
    end = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {}
    log = figures.with_suffix(".log")
    log.write_text("")

    def save() -> None:
        written = figures.with_suffix(".new")
        written.write_text(json.dumps(report))
        os.replace(written, figures)

    for name, part in parts.items():
        before = json.dumps(report)
        found = report[name] = {}
        left = end - time.monotonic()
        if left < SHORTEST:
            found[FAILED] = "no time was left"
            continue
        print(f"{name} …", flush=True)
        with log.open("a") as file:
            print(f"=== {name}", file=file)
        began = time.monotonic()
        # The limits are for a GPU that nothing else uses.
        seconds = left if arguments.tiny else min(part.seconds, left)
        options = []
        if part.is_measure:
            options = ["--device", arguments.device, "--known", before]
            options += ["--seconds", str(seconds), *["--tiny"] * arguments.tiny]
        run_part([*part.command, *options], seconds, found, save, log)
        save()
        print(f"  {time.monotonic() - began:.1f} s", flush=True)
        print("\n".join(lines(found, "  ")), flush=True)
        if name == IMPORTS and any(FAILED in case for case in found.values()):
            break
    return report


if __name__ == "__main__":
    main()
