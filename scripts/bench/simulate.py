"""Compare what `engine simulate` predicts with what clients of a server measure, on three kinds of traces.

    scripts/bench/run simulate [--seconds 10] [--rounds 3] [--rate 1] [--model PATH] [--save DIRECTORY]

A server plays two sets of traces with different random numbers, alternately, because the speed of a machine drifts. The
simulation is fitted to the steps of the first set. The times that clients of the second set measured are printed beside
those predicted from its traces. The second set is played twice, with different tokens, so that the difference of the
two runs shows how exact a prediction can be.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from engine.core.replay.dump import Dump, read_dump
from engine.core.simulation.draft_model import measure_drafts
from engine.core.simulation.frontend_times import measure_frontend
from engine.core.simulation.simulate import simulate
from engine.core.simulation.step_time import StepSample, StepTimeModel, fit, measure_steps
from engine.core.simulation.trace import TraceRequest
from engine.frontend.cli.bench.client import Answer, Endpoint, run_sessions
from engine.frontend.cli.bench.datasets import Session, Turn
from support.servers.server import Server, default_model

VOCABULARY = range(1000, 40_000)


class Figures(NamedTuple):
    """Times in milliseconds."""

    output_tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_p90: float


def random_trace(seconds: float, rng: random.Random) -> list[TraceRequest]:
    """Return requests at random times, each with a different prompt."""
    trace, now = [], 0.0
    while now < seconds:
        trace.append(TraceRequest(now, rng.randrange(20, 400), rng.randrange(16, 64)))
        now += rng.expovariate(2.0)
    return trace


def agent_trace(seconds: float, rng: random.Random) -> list[TraceRequest]:
    """Return the requests of conversations. Each prompt begins with all earlier turns."""
    trace = []
    for number in range(round(seconds / 2.5)):
        now, length = number * 2.0, 480
        for _ in range(4):
            length += rng.randrange(60, 200)
            answer = rng.randrange(20, 60)
            trace.append(
                TraceRequest(now, length, answer, prefix=f"agent{number}", prefix_tokens=length)
            )
            length += answer
            now += rng.uniform(1.0, 3.0)
    return sorted(trace, key=lambda request: request.arrival)


def burst_trace(seconds: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts of requests. Some have long prompts."""
    trace, now = [], 0.0
    while now < seconds:
        for index in range(rng.randrange(4, 8)):
            prompt = rng.randrange(600, 1200) if index < 2 else rng.randrange(30, 200)
            after = rng.uniform(0, 0.2) if index else 0.0
            trace.append(TraceRequest(now + after, prompt, rng.randrange(16, 80)))
        now += rng.uniform(3.0, 5.0)
    return sorted(trace, key=lambda request: request.arrival)


Rounds: TypeAlias = dict[str, list[list[Answer]]]
"""The answers of each round, by the kind of the trace."""

TRACES = {"random": random_trace, "agents": agent_trace, "bursts": burst_trace}


def trace_of(kind: str, seed: str, seconds: float, rate: float) -> list[TraceRequest]:
    """Return a trace of this kind, with a multiple of its usual arrival rate."""
    trace = TRACES[kind](seconds * rate, random.Random(f"{kind} {seed}"))
    for request in trace:
        request.arrival /= rate
    return trace


def prompt_of(request: TraceRequest, seed: int) -> list[int]:
    """Return token ids. The ids of a shared prefix depend only on its name."""
    num_shared = request.prefix_tokens if request.prefix else 0
    shared = random.Random(f"{request.prefix} {seed}").choices(VOCABULARY, k=num_shared)
    own = random.Random(f"{request.arrival} {seed}")
    return shared + own.choices(VOCABULARY, k=request.prompt_tokens - num_shared)


async def play(url: str, model: str, trace: list[TraceRequest], seed: int) -> list[Answer]:
    """Send each request at its time. Return the answers."""
    endpoint = Endpoint(url, model, fields={"ignore_eos": True, "temperature": 1.0})
    sessions = [Session([Turn(prompt_of(r, seed), r.output_tokens)]) for r in trace]
    answers, _ = await run_sessions(endpoint, sessions, starts=[r.arrival for r in trace])
    errors = [answer.error for answer in answers if answer.error is not None]
    assert not errors, errors[0]
    return sorted(answers, key=lambda answer: answer.start)


def measured(rounds: list[list[Answer]]) -> Figures:
    """Return the figures that the clients of all rounds measured."""
    every = [answer for answers in rounds for answer in answers]
    seconds = sum(
        max(a.chunk_times[-1] for a in answers) - min(a.start for a in answers)
        for answers in rounds
    )
    return figures(
        sum(a.output_tokens for a in every) / seconds,
        np.array([a.chunk_times[0] - a.start for a in every]),
        np.array([b - a for answer in every for a, b in pairwise(answer.chunk_times)]),
    )


def predicted(dump: Dump, step_time: StepTimeModel, traces: list[list[TraceRequest]]) -> Figures:
    """Return the predictions of a simulation for these traces."""
    drafts, frontend = measure_drafts([dump]), measure_frontend([dump])
    results = [simulate(dump.setup, trace, step_time, 1, drafts, frontend) for trace in traces]
    return figures(
        sum(r.output_tokens for r in results) / sum(r.seconds for r in results),
        np.concatenate([r.latencies.first_token for r in results]),
        np.concatenate([r.latencies.inter_token for r in results]),
    )


def figures(rate: float, first: np.ndarray, between: np.ndarray) -> Figures:
    percentiles = [np.percentile(times, (50, 90)) * 1e3 for times in (first, between)]
    return Figures(rate, *map(float, np.concatenate(percentiles)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each trace in seconds"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of traces for each kind and server"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor that multiplies the arrival rates"
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--save", help="keep the log, the traces and the answers in this directory")
    args = parser.parse_args()
    traces: dict[str, list[list[TraceRequest]]] = {kind: [] for kind in TRACES}
    answers: Rounds = {kind: [] for kind in TRACES}
    repeated: Rounds = {kind: [] for kind in TRACES}
    steps: list[StepSample] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = (args.model or default_model(), "--max-model-len", "4096", "--dump-dir", directory)
        with Server(*flags) as server:
            model = server.get("/v1/models")[1]["data"][0]["id"]

            def run(trace: list[TraceRequest], seed: int) -> list[Answer]:
                return asyncio.run(play(server.url, model, trace, seed))

            run(random_trace(2, random.Random(0)), 0)
            for number in range(args.rounds):
                fitted: list[tuple[float, float]] = []
                for kind in TRACES:
                    trace = trace_of(kind, f"{number} held out", args.seconds, args.rate)
                    traces[kind].append(trace)
                    answers[kind].append(run(trace, number))
                    begin = time.monotonic()
                    run(trace_of(kind, str(number), args.seconds, args.rate), number)
                    fitted.append((begin, time.monotonic()))
                    repeated[kind].append(run(trace, number + args.rounds))
                # The log keeps only the last minutes, so it is read after every round.
                path = Path(server.post("/debug/dump", {})[1]["files"][0])
                dump = read_dump(str(path))
                steps += [
                    step
                    for step in measure_steps(dump)
                    if any(begin <= step.ended_at <= end for begin, end in fitted)
                ]
        if args.save:
            Path(args.save, path.name).write_bytes(path.read_bytes())
            saved = {"traces": traces, "answers": answers, "repeated": repeated, "steps": steps}
            Path(args.save, "played.json").write_bytes(msgspec.json.encode(saved))
    report(dump, steps, traces, answers, repeated)


def report(
    dump: Dump,
    steps: list[StepSample],
    traces: dict[str, list[list[TraceRequest]]],
    answers: Rounds,
    repeated: Rounds,
) -> None:
    """Print the predictions from these steps beside what clients measured."""
    fitted = fit(steps)
    print(
        f"{fitted.num_steps} steps fitted; on held-out parts of the log single steps are "
        f"{fitted.held_out_error:.0%} off, their total {fitted.held_out_bias:+.1%}"
    )
    columns = ("measured", "predicted", "off by", "run 2 off by")
    print(f"{'trace':8} {'figure':20} {' '.join(f'{name:>12}' for name in columns)}")
    for kind in traces:
        runs = measured(answers[kind]), measured(repeated[kind])
        forecasts = predicted(dump, fitted.model, traces[kind])
        for name, first, second, forecast in zip(Figures._fields, *runs, forecasts, strict=True):
            # The mean of two ratios is geometric, so that it does not depend on their order.
            real = math.sqrt(first * second)
            off, noise = forecast / real - 1, second / first - 1
            print(f"{kind:8} {name:20} {real:12.1f} {forecast:12.1f} {off:+12.1%} {noise:+12.1%}")


if __name__ == "__main__":
    main()
