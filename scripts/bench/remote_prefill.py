"""Measure prefill replicas: the time of moving a prompt's blocks, and times between tokens while long prompts arrive.

    scripts/bench/run remote_prefill [--model PATH] [--tokens 4000] [--streams 8] [--prompts 4]

"Moving" is the time until the first token of a prompt that the prefill replica has cached. "Computing" is the time for
a new prompt at the prefill replica. Streams are measured together with long prompts and a prefill replica, then alone
up to the same length, because steps of longer streams take longer, then together with long prompts and two replicas
without roles. Drafts are off, because steps with drafts take longer than others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable

from support.processes.program import wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, default_model

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


class Intervals:
    """Running streams, and the seconds between their tokens since all of them had some."""

    def __init__(self, server: Server, num_streams: int) -> None:
        body = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
        self._streams = Streams(
            server, [{"prompt": f"Tale {i}:", **body} for i in range(num_streams)]
        )
        wait_until(lambda: self.num_tokens > 3, 60)
        self._seconds: list[float] = []

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the shortest stream."""
        return min(stream.num_events for stream in self._streams.streams)

    def measure(self, is_over: Callable[[], bool]) -> None:
        """Record the time of every token until `is_over`, then end the streams."""
        streams = self._streams.streams
        counts = [stream.num_events for stream in streams]
        since = [time.perf_counter()] * len(streams)
        while not is_over():
            now = time.perf_counter()
            for number, stream in enumerate(streams):
                if stream.num_events > counts[number]:
                    self._seconds.append(now - since[number])
                    counts[number], since[number] = stream.num_events, now
            time.sleep(0.001)
        for stream in streams:
            stream.max_events = 0
        self._streams.answers()

    def summary(self) -> dict[str, float]:
        """Return the median and the 99th percentile in milliseconds, and the number of intervals."""
        cuts = statistics.quantiles(self._seconds, n=100)
        return {
            "median_ms": round(statistics.median(self._seconds) * 1e3, 1),
            "p99_ms": round(cuts[98] * 1e3, 1),
            "intervals": len(self._seconds),
        }


def measure_beside(
    server: Server, num_streams: int, send: Callable[[Server], None]
) -> tuple[dict[str, float], int]:
    """Return the intervals of streams while `send` sends prompts, and the length that the streams reach."""
    intervals = Intervals(server, num_streams)
    sending = threading.Thread(target=send, args=(server,))
    sending.start()
    intervals.measure(lambda: not sending.is_alive())
    return intervals.summary(), intervals.num_tokens


def measure_alone(server: Server, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Return the intervals of streams alone, up to `num_tokens` tokens each."""
    intervals = Intervals(server, num_streams)
    intervals.measure(lambda: intervals.num_tokens >= num_tokens)
    return intervals.summary()


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
    no_drafts = ("--speculative-config", '{"num_speculative_tokens": 0}')
    limits = ("--max-model-len", "8192", *no_drafts, *args.serve)

    def send(server: Server) -> None:
        for _ in range(args.prompts):
            ask(server, prompts.next())

    with Server(args.model, *limits, *ROLES) as server:
        print(json.dumps(measure_moving(server, prompts, args.rounds)), flush=True)
        beside, num_tokens = measure_beside(server, args.streams, send)
        alone = measure_alone(server, args.streams, num_tokens)
        print(json.dumps({"replicas": "roles", "alone": alone, "beside": beside}), flush=True)
    with Server(args.model, *limits, "--data-parallel-size", "2") as server:
        beside, _ = measure_beside(server, args.streams, send)
        print(json.dumps({"replicas": "without roles", "beside": beside}), flush=True)


if __name__ == "__main__":
    main()
