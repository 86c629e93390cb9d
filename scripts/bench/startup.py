"""How long `engine --help` and a cold start take, and how much memory the processes hold once ready.

    scripts/bench/run startup [--model PATH] [--runs 5]

The model is cached; "first token" is when the server says ready, which it does after it has generated one
token through every process.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time

import psutil

ENGINE = (sys.executable, "-m", "engine.frontend.cli")
MIB = 1024 * 1024


def time_help() -> float:
    begin = time.perf_counter()
    subprocess.run([*ENGINE, "--help"], check=True, capture_output=True)
    return time.perf_counter() - begin


def time_start(model: list[str]) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds until ready, and MiB of each process then."""
    begin = time.perf_counter()
    server = subprocess.Popen(
        [*ENGINE, "serve", *model, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if re.search("ready at", line):
            break
    else:
        raise SystemExit("the server did not start:\n" + "".join(lines))
    seconds = time.perf_counter() - begin
    memory = {}
    parent = psutil.Process(server.pid)
    for process in (parent, *parent.children(recursive=True)):
        info = process.memory_full_info()
        memory[process.cmdline()[0]] = {"rss": info.rss / MIB, "pss": info.pss / MIB}
    server.send_signal(signal.SIGINT)
    server.communicate()
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    helps = [time_help() for _ in range(arguments.runs)]
    starts = [time_start(model) for _ in range(arguments.runs)]
    memory = starts[-1][1]
    small = [v["rss"] for name, v in memory.items() if "frontend" in name or "core" in name]
    report = {
        "help_s": {"median": statistics.median(helps), "max": max(helps)},
        "start_to_first_token_s": {
            "median": statistics.median(s for s, _ in starts),
            "all": [s for s, _ in starts],
        },
        "frontend_and_core_rss_mib": sum(small),
        "memory_mib": memory,
    }
    print(json.dumps(report, indent=1, default=float))


if __name__ == "__main__":
    main()
