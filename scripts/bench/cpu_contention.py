"""Measure the throughput of the server alone, and next to processes that keep the CPU cores busy.

    scripts/bench/run cpu_contention [--model PATH] [-c 8] [--hogs 1] [--rounds 3] [-- serve arguments]

Each round measures both, so that both run under the same conditions. `fair_share` is the throughput that the server's
threads would have if every runnable thread got the same CPU time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from functools import partial
from typing import Any

import uvloop
from side_by_side.load import measure
from side_by_side.points import Point
from side_by_side.rounds import alternate
from support.server import Server


def count_for_ever() -> None:
    number = 0
    while True:
        number += 1


async def throughput(url: str, model: str, concurrency: int, requests: int) -> float:
    result = await measure(url, model, Point(32, 64, concurrency, requests))
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed: {result['first_error']}")
    rate: float = result["output_tok_s"]
    return rate


def with_hogs(count: int, url: str, model: str, concurrency: int, requests: int) -> float:
    hogs = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(count)]
    for hog in hogs:
        hog.start()
    try:
        return uvloop.run(throughput(url, model, concurrency, requests))
    finally:
        for hog in hogs:
            hog.kill()
            hog.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="model to measure (default: the default model)")
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("-n", "--requests", type=int, default=32)
    parser.add_argument("--hogs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    named = [*model, "--served-model-name", "busy", *arguments.serve]
    with Server(*named) as server:
        point = server.url, "busy", arguments.concurrency, arguments.requests
        counts = {"alone": 0, "busy": arguments.hogs}
        runs = {name: partial(with_hogs, count, *point) for name, count in counts.items()}
        results = alternate(runs, arguments.rounds)
    alone, busy = (statistics.median(rates) for rates in results.values())
    cores = len(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "output_tok_s": results,
        "busy_to_alone": round(busy / alone, 3),
        "fair_share": round(min(1.0, cores / (cores + arguments.hogs)), 3),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
