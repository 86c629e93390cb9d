"""Kill frontends, cores, the store, supervisors and whole servers while clients return with Last-Event-ID.

    scripts/bench/run durable_chaos --minutes 5 --streams 24

Clients read streams of a server with `--store`, and return whenever a stream is cut. Every second or two, a random
process is killed, or all processes at the same time; then a new server is started on the same store. Every answer must
be the same as without faults, and nothing may be held afterwards. Prints a line of JSON per wave and a summary; exits
with 1 for a cut, wrong or doubled stream, or a leak.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.requests.returning_streams import TIMEOUT_S, ReturningStreams
from support.servers.durable_engine import DurableEngine
from support.servers.server import assert_nothing_is_held, default_model

FAULTS: dict[str, Callable[[DurableEngine], None]] = {
    "frontend 0": lambda engine: engine.server.child("frontend 0").kill(),
    "frontend 1": lambda engine: engine.server.child("frontend 1").kill(),
    "core 0": lambda engine: engine.server.child("core 0").kill(),
    "worker 0": lambda engine: engine.server.child("worker 0").kill(),
    "store": lambda engine: engine.server.child("store").kill(),
    "supervisor": lambda engine: engine.server.child("supervisor").kill(),
    "guardian": DurableEngine.kill_guardian,
    "everything": DurableEngine.kill_all,
}


def make_bodies(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return requests with seeds, so that their answers can be compared; every third has log-probabilities."""
    return [
        {
            "prompt": f"Chapter {number}. Once upon a time there",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            **({"logprobs": 2} if number % 3 == 0 else {}),
            **({"n": 2} if number % 4 == 1 else {}),
        }
        for number in range(count)
    ]


def run_wave(
    engine: DurableEngine, streams: ReturningStreams, rng: random.Random, num_tokens: int
) -> Counter[str]:
    """Disturb streams until half of their tokens have arrived, and return the faults.

    A slow machine may make no progress between faults. So these stop in time for streams to end within their limit.
    """
    faults: Counter[str] = Counter()
    goal = len(streams.streams) * num_tokens // 2
    deadline = time.monotonic() + TIMEOUT_S / 2
    while streams.num_events < goal and time.monotonic() < deadline:
        time.sleep(rng.uniform(0.2, 2.0))
        name = rng.choice(list(FAULTS))
        print(f"{time.strftime('%X')} {name}", file=sys.stderr, flush=True)
        FAULTS[name](engine)
        faults[name] += 1
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--streams", type=int, default=24, help="streams per wave")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "serve", nargs="*", help="after --: additional arguments for `engine serve`"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    bodies = make_bodies(args.streams, args.tokens)
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as directory:
        serve = (args.model, "--max-model-len", "1024", "--max-restarts", "20", *args.serve)
        engine = DurableEngine(Path(directory, "store.db"), directory, *serve)
        try:
            undisturbed = [s.answer for s in ReturningStreams(engine.find_url, bodies, "0").join()]
            end = time.monotonic() + args.minutes * 60
            while time.monotonic() < end:
                total["waves"] += 1
                streams = ReturningStreams(engine.find_url, bodies, f"wave {total['waves']}")
                faults += run_wave(engine, streams, rng, args.tokens)
                ended = streams.join()
                wave: Counter[str] = Counter(streams=len(ended))
                for stream, expected in zip(ended, undisturbed, strict=True):
                    wave["returns"] += stream.num_returns
                    kind = "right" if stream.answer == expected else "wrong"
                    if stream.problem or not stream.is_done:
                        kind = "cut"
                    wave[kind] += 1
                    wave["doubled"] += len(stream.ids) != 1
                    if kind != "right":
                        print(f"{stream.answer}\ninstead of\n{expected}", file=sys.stderr)
                if wave["right"] < len(ended):
                    print(engine.server.log, file=sys.stderr)
                assert_nothing_is_held(engine.server)
                total += wave
                print(json.dumps(wave), flush=True)
        finally:
            with engine.server as server:
                exit_code = server.stop()
    print(json.dumps({**total, "faults": faults, "exit_code": exit_code}))
    return int(bool(total["cut"] or total["wrong"] or total["doubled"] or exit_code))


if __name__ == "__main__":
    sys.exit(main())
