"""Run random traffic against the scheduler alone, and check every invariant after every step.

    scripts/bench/run soak [--steps 1000000] [--seconds N] [--first-seed 0]

Prints the seed of the first run that fails; `--first-seed` starts from it again.
"""

from __future__ import annotations

import argparse
import sys
import time

from support.scheduler.traffic import run_traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="also stop after this many seconds"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--actions", type=int, default=300, help="random actions per seed")
    args = parser.parse_args()
    started, num_steps, seed = time.monotonic(), 0, args.first_seed
    while num_steps < args.steps and time.monotonic() - started < args.seconds:
        try:
            num_steps += run_traffic(seed, args.actions)
        except Exception:
            print(f"seed {seed} failed after {num_steps} good steps", file=sys.stderr)
            raise
        seed += 1
    seconds = time.monotonic() - started
    print(f"{num_steps} steps, {seed - args.first_seed} seeds, {seconds:.0f} s, no violation")


if __name__ == "__main__":
    main()
