"""Measure how fast a fleet of replicas is simulated, compared with real time.

    scripts/bench/run fleet [--replicas 1000] [--rate 0.5] [--seconds 20] [--processes 2] [--stepwise]

Requests arrive at random times. Half of them share the beginning of their prompts with others. A step takes 20 ms, and
20 µs more for each token. The routing is that of a frontend that serves the whole fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time

import psutil
from engine.core.replay.recorder import Setup
from engine.core.simulation.simulate import simulate
from engine.core.simulation.step_time import StepTimeModel
from engine.core.simulation.trace import TraceRequest
from engine.protocol.config import CacheConfig, SchedulerConfig

STEP_TIME = StepTimeModel(base=0.02, per_token=2e-5, per_sequence=1e-5, per_kv_token=1e-8)


def make_trace(seconds: float, rate: float) -> list[TraceRequest]:
    rng = random.Random(1)
    trace, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        name, shared = f"system{rng.randrange(100)}", rng.choice((0, 512))
        length = shared + rng.randrange(50, 500)
        output = rng.randrange(50, 350)
        trace.append(TraceRequest(now, length, output, prefix=name, prefix_tokens=shared))
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument(
        "--rate",
        type=float,
        default=0.5,
        help="requests per second for each replica (default: 0.5)",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds during which requests arrive"
    )
    parser.add_argument(
        "--stepwise", action="store_true", help="simulate every step, without skipping"
    )
    parser.add_argument("--processes", type=int, help="default: one for each core")
    args = parser.parse_args()
    trace = make_trace(args.seconds, args.rate * args.replicas)
    setup = Setup(
        SchedulerConfig(max_num_seqs=64), CacheConfig(block_size=16), 4096, 1, num_blocks=4000
    )
    began, cpu_began = time.perf_counter(), sum(os.times()[:4])
    result = simulate(
        setup,
        trace,
        STEP_TIME,
        args.replicas,
        can_skip=not args.stepwise,
        num_processes=args.processes,
    )
    seconds, cpu_seconds = time.perf_counter() - began, sum(os.times()[:4]) - cpu_began
    summary = result.summary()
    figures = {
        "replicas": args.replicas,
        "requests": len(trace),
        "virtual_s": round(result.seconds, 1),
        "wall_s": round(seconds, 1),
        "cpu_s": round(cpu_seconds, 1),
        "times_real_time": round(result.seconds / seconds, 2),
        "memory_mib": psutil.Process().memory_info().rss >> 20,
        **{name: summary[name] for name in ("output_tokens_per_s", "ttft_p90_ms", "itl_p90_ms")},
        "cached_tokens": summary["cached_tokens"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
