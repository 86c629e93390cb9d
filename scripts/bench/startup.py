"""Measure the time of `engine --help` and of a cold start, and the memory of the processes once ready.

    scripts/bench/run startup [--model PATH] [--runs 5]

The model is cached. The server says ready after it has generated one token through every process.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

ENGINE = (sys.executable, "-m", "engine.frontend.cli.main")
MIB = 1024 * 1024


def time_help() -> float:
    begin = time.perf_counter()
    subprocess.run([*ENGINE, "--help"], check=True, capture_output=True)
    return time.perf_counter() - begin


def time_start(model: list[str]) -> dict[str, Any]:
    """Return the seconds until each line of the start and until ready, and each process's CPU seconds and MiB."""
    begin = time.perf_counter()
    server = subprocess.Popen(
        [*ENGINE, "serve", *model, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        seconds = time.perf_counter() - begin
        lines.append((round(seconds, 3), line.split("] ")[-1].strip()))
        if "ready at" in line:
            break
    else:
        raise SystemExit("the server did not start:\n" + "\n".join(text for _, text in lines))
    processes = {}
    parent = psutil.Process(server.pid)
    for process in (parent, *parent.children(recursive=True)):
        memory, cpu = process.memory_full_info(), process.cpu_times()
        processes[process.cmdline()[0].removeprefix("engine: ")] = {
            "cpu_s": cpu.user + cpu.system,
            "rss_mib": memory.rss / MIB,
            "pss_mib": memory.pss / MIB,
        }
    server.send_signal(signal.SIGINT)
    server.communicate()
    return {"ready_s": seconds, "lines": lines, "processes": processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="model to measure (default: the default model)")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    helps = [time_help() for _ in range(arguments.runs)]
    starts = [time_start(model) for _ in range(arguments.runs)]
    best = min(starts, key=lambda start: start["ready_s"])
    report = {
        "help_s": {"median": statistics.median(helps), "max": max(helps)},
        "ready_s": {
            "median": statistics.median(start["ready_s"] for start in starts),
            "all": [start["ready_s"] for start in starts],
        },
        "quickest": best,
        "frontend_and_core_rss_mib": sum(
            process["rss_mib"]
            for name, process in best["processes"].items()
            if name.startswith(("frontend", "core"))
        ),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
