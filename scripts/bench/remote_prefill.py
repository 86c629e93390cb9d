"""Measure prefill replicas: the time of moving a prompt's blocks, and times between tokens while long prompts arrive.

    scripts/bench/run remote_prefill [--model PATH] [--tokens 4000] [--streams 8] [--prompts 4]

"Moving" is the time until the first token of a prompt that the prefill replica has cached. "Computing" is the time for
a new prompt at the prefill replica. Streams are measured alone, then together with long prompts and a prefill replica,
then together with long prompts and two replicas without roles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable

from support.mixed_streams import Streams
from support.program import wait_until
from support.server import Server, default_model

PREFILL = "0"
ROLES = ("--replica-roles", "prefill=1,decode=1")


class Prompts:
    """Random prompts of equal length, all different."""

    def __init__(self, num_tokens: int) -> None:
        self._rng = random.Random(1)
        self._num_tokens = num_tokens

    def next(self) -> list[int]:
        return [self._rng.randrange(1000, 20_000) for _ in range(self._num_tokens)]


def ask(server: Server, prompt: list[int], replica: str | None = None) -> tuple[float, int]:
    """Send a prompt to generate one token. Return the seconds until it arrives, and the token."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    headers = None if replica is None else {"X-data-parallel-rank": replica}
    start = time.perf_counter()
    status, answer = server.post("/v1/completions", body, timeout=600, headers=headers)
    assert status == 200, answer
    return time.perf_counter() - start, answer["choices"][0]["token_ids"][0]


def measure_moving(server: Server, prompts: Prompts, rounds: int) -> dict[str, float]:
    """Return the median seconds of computing a prompt and of moving it."""
    computed, moved = [], []
    for _ in range(rounds):
        prompt = prompts.next()
        seconds, token = ask(server, prompt, PREFILL)
        computed.append(seconds)
        seconds, same_token = ask(server, prompt)
        assert token == same_token
        moved.append(seconds)
    compute_s, move_s = statistics.median(computed), statistics.median(moved)
    num_bytes = server.metric("engine:kv_transfer_received_bytes_total")
    return {
        "compute_s": round(compute_s, 3),
        "move_s": round(move_s, 3),
        "move_of_compute": round(move_s / compute_s, 4),
        "moved_mib": round(num_bytes / rounds / 2**20, 1),
    }


def measure_intervals(
    server: Server, num_streams: int, seconds: float, disturb: Callable[[], None] | None
) -> dict[str, float]:
    """Return the median and the 99th percentile of the milliseconds between tokens of running streams."""
    body = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
    streams = Streams(server, [{"prompt": f"Tale {i}:", **body} for i in range(num_streams)])
    wait_until(lambda: all(stream.num_events > 3 for stream in streams.streams), 60)
    disturbing = None if disturb is None else threading.Thread(target=disturb)
    counts = [stream.num_events for stream in streams.streams]
    since = [time.perf_counter()] * num_streams
    intervals: list[float] = []
    end = time.perf_counter() + seconds
    if disturbing is not None:
        disturbing.start()
    while time.perf_counter() < end or (disturbing is not None and disturbing.is_alive()):
        now = time.perf_counter()
        for number, stream in enumerate(streams.streams):
            if stream.num_events > counts[number]:
                intervals.append(now - since[number])
                counts[number], since[number] = stream.num_events, now
        time.sleep(0.001)
    for stream in streams.streams:
        stream.max_events = 0
    streams.answers()
    cuts = statistics.quantiles(intervals, n=100)
    return {
        "median_ms": round(statistics.median(intervals) * 1e3, 1),
        "p99_ms": round(cuts[98] * 1e3, 1),
        "intervals": len(intervals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument(
        "--tokens", type=int, default=4000, help="number of tokens in each long prompt"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument(
        "--prompts", type=int, default=4, help="number of long prompts sent while streams run"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    args = parser.parse_args()
    prompts = Prompts(args.tokens)
    limits = ("--max-model-len", "8192", *args.serve)

    def send(server: Server) -> None:
        for _ in range(args.prompts):
            ask(server, prompts.next())

    with Server(args.model, *limits, *ROLES) as server:
        print(json.dumps(measure_moving(server, prompts, args.rounds)), flush=True)
        alone = measure_intervals(server, args.streams, 10.0, None)
        beside = measure_intervals(server, args.streams, 0.0, lambda: send(server))
        print(json.dumps({"replicas": "roles", "alone": alone, "beside": beside}), flush=True)
    with Server(args.model, *limits, "--data-parallel-size", "2") as server:
        beside = measure_intervals(server, args.streams, 0.0, lambda: send(server))
        print(json.dumps({"replicas": "without roles", "beside": beside}), flush=True)


if __name__ == "__main__":
    main()
