"""Compare the predictions of `engine simulate` with a real server.

    scripts/bench/run simulate [--requests 40] [--rate 3] [--model PATH]

Starts one, sends it requests at seeded random times, fits the step time to the event log of that very run, simulates
the same arrivals, and prints throughput and latencies both ways.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from itertools import chain, pairwise
from urllib.parse import urlsplit

import msgspec
from engine.core.replay.dump import Dump, read_dump
from engine.core.replay.replayer import Replayer
from engine.core.simulation.draft_model import measure_drafts
from engine.core.simulation.simulate import simulate
from engine.core.simulation.step_time import fit, mean_error, measure_steps
from engine.core.simulation.trace import trace_from_dump
from engine.protocol.messages import EventKind, RequestEvents
from support.server import Server, default_model


class Answer(msgspec.Struct):
    """The times when a request was sent and when its tokens arrived."""

    sent: float
    token_times: list[float] = []


def ask(url: str, words: int, max_tokens: int, answer: Answer) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    body = {
        "prompt": " ".join(f"word{random.randrange(10**6)}" for _ in range(words)),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            answer.token_times.append(time.monotonic())
    connection.close()


def run_load(url: str, num_requests: int, rate: float) -> list[Answer]:
    rng = random.Random(0)
    threads, answers = [], []
    due = time.monotonic()
    for _ in range(num_requests):
        due += rng.expovariate(rate)
        time.sleep(max(0.0, due - time.monotonic()))
        answer = Answer(time.monotonic())
        words, max_tokens = rng.randrange(5, 80), rng.randrange(16, 64)
        thread = threading.Thread(target=ask, args=(url, words, max_tokens, answer))
        thread.start()
        threads.append(thread)
        answers.append(answer)
    for thread in threads:
        thread.join()
    return answers


def measured(answers: list[Answer]) -> dict[str, float]:
    gaps = [b - a for answer in answers for a, b in pairwise(answer.token_times)]
    seconds = max(answer.token_times[-1] for answer in answers) - answers[0].sent
    first = [answer.token_times[0] - answer.sent for answer in answers]
    return {
        "output_tokens_per_s": sum(len(answer.token_times) for answer in answers) / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "ttft_p90_ms": 1e3 * statistics.quantiles(first, n=10)[-1],
        "itl_p50_ms": 1e3 * statistics.median(gaps),
    }


def first_token_times(dump: Dump) -> list[float]:
    """Seconds from the arrival at the core to the first token's return to it."""
    queued: dict[tuple[int, int], float] = {}
    times = []
    for segment in dump.segments:
        for moment in Replayer(dump.setup, segment).run():
            for client_index, message in (moment.outputs or {}).items():
                for event in chain.from_iterable(map(RequestEvents.split, message.events)):
                    key = client_index, event.request_index
                    if event.kind is EventKind.QUEUED:
                        queued[key] = event.timestamp
                    elif event.kind is EventKind.FIRST_TOKEN and key in queued:
                        times.append(event.timestamp - queued[key])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or default_model()
        with Server(model, "--max-model-len", "2048", "--dump-dir", directory) as server:
            ask(server.url, 5, 8, Answer(0.0))
            started = time.monotonic()
            real = measured(run_load(server.url, args.requests, args.rate))
            status, answer = server.post("/debug/dump", {})
            assert status == 200, answer
            (path,) = answer["files"]
        dump = read_dump(path)
    samples = measure_steps(dump)
    model_of_time = fit(samples)
    trace = [request for request in trace_from_dump(dump) if request.output_tokens >= 16]
    start = trace[0].arrival
    for request in trace:
        request.arrival -= start
    at_core = 1e3 * statistics.median(first_token_times(dump)[-args.requests :])
    simulated = simulate(dump.setup, trace, model_of_time, 1, measure_drafts([dump])).summary()
    print(f"{len(samples)} steps fitted, {mean_error(model_of_time, samples):.0%} off on average")
    print(
        f"{'':20} {'real':>10} {'simulated':>10} {'off by':>8}   ({time.monotonic() - started:.0f} s)"
    )
    print(f"{'ttft_p50_ms at core':20} {at_core:10.1f}")
    for name, value in real.items():
        off = simulated[name] / value - 1
        print(f"{name:20} {value:10.1f} {simulated[name]:10.1f} {off:8.0%}")


if __name__ == "__main__":
    main()
