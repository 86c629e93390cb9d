"""Measure the cost of a step in the core, without a model.

    scripts/bench/run scheduler [--running 1,16,64] [--steps 300] [--prompt 512] [--vllm-python PATH]

Times are per step, while every request decodes: schedule() and update_from_output(), and the encoding and decoding of
SchedulerOutput, ModelRunnerOutput and EngineCoreOutputs, with two steps in flight, statistics and the event log on.
With `--vllm-python`, only schedule() and update_from_output() are measured, alternately with vLLM's own scheduler,
which does not encode messages.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from engine.core.replay.recorder import RecordedScheduler, Setup
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.block_hash import hash_blocks, root_hash
from engine.protocol.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from engine.protocol.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from side_by_side.child import Child

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
EOS = VOCAB_SIZE - 1
TURNS = 5
NUM_DRAFTS = 4

RECORDED = True
"""True if the scheduler records its event log, as it always does in the core."""

encode = msgspec.msgpack.Encoder().encode
decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_result = msgspec.msgpack.Decoder(ModelRunnerOutput).decode
decode_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs).decode


class Loop:
    """The core's work for each step, with a worker that answers immediately."""

    def __init__(
        self,
        num_seqs: int,
        num_tokens: int,
        budget: int | None = None,
        speculative: SpeculativeConfig | None = None,
        num_blocks: int = 0,
    ) -> None:
        num_blocks = num_blocks or num_seqs * (num_tokens // BLOCK_SIZE + 1) + 2
        setup = Setup(
            SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=budget or 1 << 30,
                speculative=speculative,
            ),
            CacheConfig(block_size=BLOCK_SIZE),
            max_model_len=num_tokens,
            vocab_size=VOCAB_SIZE,
            num_blocks=num_blocks,
        )
        self.scheduler = RecordedScheduler(setup) if RECORDED else setup.make_scheduler()
        self.rng = np.random.default_rng(0)
        self.num_requests = 0
        self.in_flight: deque[tuple[SchedulerOutput, int]] = deque()
        self.tokens = np.arange(num_seqs, dtype=np.int32) % (VOCAB_SIZE - 2)
        self.num_rows = self.step_bytes = self.output_bytes = 0

    def request(self, length: int, max_tokens: int) -> EngineCoreRequest:
        token_ids = self.rng.integers(0, VOCAB_SIZE - 2, length, dtype=np.int32)
        self.num_requests += 1
        return EngineCoreRequest(
            request_index=self.num_requests,
            prompt_token_ids=token_ids.tobytes(),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            arrival_time=0.0,
            eos_token_ids=(EOS,),
            block_hashes=hash_blocks(token_ids, BLOCK_SIZE, root_hash()),
            root_hash=root_hash(),
        )

    def add(self, length: int, max_tokens: int) -> int:
        request = self.request(length, max_tokens)
        self.scheduler.add_request(0, request, 0.0)
        return request.request_index

    def send(self) -> None:
        step = self.scheduler.schedule(0.0)
        assert step is not None
        frame = encode(step)
        self.step_bytes = len(frame)
        received = decode_step(frame)
        # No prompt is divided in this benchmark, so every row samples.
        if received.slots is not None:
            self.num_rows = len(received.slots) // 4
        self.in_flight.append((step, self.num_rows))
        assert received.step == step.step

    def take(self) -> None:
        step, num_sampling = self.in_flight.popleft()
        result = decode_result(encode(self.result(step, num_sampling)))
        for outputs in self.scheduler.update_from_output(step, result, 0.0).values():
            frame = encode(outputs)
            self.output_bytes = len(frame)
            decode_outputs(frame)

    def result(self, step: SchedulerOutput, num_sampling: int) -> ModelRunnerOutput:
        return ModelRunnerOutput(step.step, self.tokens[:num_sampling].tobytes())

    def run(self) -> None:
        self.send()
        self.take()


class DraftLoop(Loop):
    """A loop in which every request has drafts. Every second request accepts half of them."""

    def __init__(self, num_seqs: int, num_tokens: int) -> None:
        super().__init__(num_seqs, num_tokens, None, SpeculativeConfig(NUM_DRAFTS, adaptive=False))

    def result(self, step: SchedulerOutput, num_sampling: int) -> ModelRunnerOutput:
        slots = np.arange(num_sampling)
        drafts = int32_view(step.drafts).reshape(-1, 2)
        num_drafts = np.zeros(num_sampling, np.int64)
        num_drafts[drafts[:, 0]] = drafts[:, 1]
        counts = 1 + np.where(slots % 2, np.minimum(num_drafts, NUM_DRAFTS // 2), 0)
        proposed = np.zeros(num_sampling * NUM_DRAFTS, np.int32)
        return ModelRunnerOutput(
            step.step,
            np.zeros(int(counts.sum()), np.int32).tobytes(),
            num_sampled=int32_bytes(counts) if len(drafts) else b"",
            drafts=DraftTokenIds(
                step.step,
                int32_bytes(slots),
                int32_bytes(np.full(num_sampling, NUM_DRAFTS)),
                proposed.tobytes(),
            ),
            seconds=0.01,
        )


def time_each(
    action: Callable[[], object], repeats: int, between: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the microseconds of each call, without those of `between`, which is called after each.

    Garbage collection is off, because the core avoids it as well.
    """
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e6)
        between()
    gc.unfreeze()
    return times


def summary(times: list[float]) -> dict[str, float]:
    return {
        "mean_us": round(statistics.fmean(times), 1),
        "median_us": round(statistics.median(times), 1),
        "p99_us": round(sorted(times)[int(len(times) * 0.99)], 1),
    }


def decoding_loop(num_seqs: int, steps: int, prompt: int) -> Loop:
    """Return a loop in which every request decodes, and the allocations of blocks are evenly spread over the steps."""
    loop = Loop(num_seqs, prompt + BLOCK_SIZE + steps + 100)
    for index in range(num_seqs):
        loop.add(prompt + index % BLOCK_SIZE, steps + 100)
    loop.send()
    for _ in range(20):
        loop.run()
    return loop


def decode_repeatedly(num_seqs: int, steps: int, prompt: int) -> dict[str, Any]:
    loop = decoding_loop(num_seqs, steps, prompt)
    times = time_each(loop.run, steps)
    return {
        "case": "decode",
        "running": num_seqs,
        **summary(times),
        "step_bytes": loop.step_bytes,
        "output_bytes": loop.output_bytes,
    }


def decode_with_drafts(num_seqs: int, steps: int, prompt: int) -> dict[str, Any]:
    num_tokens = (steps + 100) * (NUM_DRAFTS + 1)
    loop = DraftLoop(num_seqs, prompt + BLOCK_SIZE + num_tokens)
    for index in range(num_seqs):
        loop.add(prompt + index % BLOCK_SIZE, num_tokens)
    loop.send()
    for _ in range(20):
        loop.run()
    return {
        "case": f"decode with {NUM_DRAFTS} drafts",
        "running": num_seqs,
        **summary(time_each(loop.run, steps)),
    }


def beside_vllm(vllm: Child, num_seqs: int, steps: int, prompt: int) -> dict[str, Any]:
    loop = decoding_loop(num_seqs, steps, prompt)
    vllm.ask([num_seqs, prompt, 1])
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(TURNS):
        ours += time_each(loop.run, steps // TURNS)
        answer = vllm.ask([num_seqs, prompt, steps // TURNS])
        theirs += answer["us"]
    # Use the minimum, because other work on the machine interrupts long steps more often.
    least = min(ours), min(theirs)
    return {
        "case": f"decode, vLLM {answer['version']}",
        "running": num_seqs,
        "least_us": round(least[0], 1),
        "median_us": round(statistics.median(ours), 1),
        "vllm_least_us": round(least[1], 1),
        "vllm_median_us": round(statistics.median(theirs), 1),
        "ratio_of_least": round(least[1] / least[0], 1),
    }


def churn(num_seqs: int, steps: int, events: int, prompt: int) -> dict[str, Any]:
    """Measure steps in which `events` requests arrive and as many end. The scheduler receives these one step later."""
    lifetime = num_seqs // events
    loop = Loop(num_seqs + 2 * events, prompt + 32 + lifetime + 2 * BLOCK_SIZE)
    num_first = 40 + lifetime
    waves = iter(
        [[loop.request(prompt, lifetime) for _ in range(events)] for _ in range(num_first + steps)]
    )

    def wave() -> None:
        for request in next(waves):
            loop.scheduler.add_request(0, request, 0.0)
        loop.run()

    for request in next(waves):
        loop.scheduler.add_request(0, request, 0.0)
    loop.send()
    for _ in range(num_first - 1):
        wave()
    num_running = loop.scheduler.get_request_counts()[0]
    times = time_each(wave, steps, loop.scheduler.end_turn)
    return {
        "case": f"{events} arrivals and ends a step, {prompt} tokens",
        "running": num_running,
        **summary(times),
    }


def many_waiting(num_seqs: int, steps: int, num_waiting: int) -> dict[str, Any]:
    """Measure decode steps while many requests wait in the queue."""
    loop = Loop(num_seqs, 512 + BLOCK_SIZE + steps + 100)
    for index in range(num_seqs):
        loop.add(512 + index % BLOCK_SIZE, steps + 100)
    loop.send()
    add = time_each(lambda: loop.add(8, 8), num_waiting)
    for _ in range(20):
        loop.run()
    times = time_each(loop.run, steps)
    aborts = iter(range(loop.num_requests, loop.num_requests - num_waiting, -1))
    abort = time_each(
        lambda: loop.scheduler.finish_requests([(0, next(aborts))], FinishReason.ABORT), num_waiting
    )
    return {
        "case": f"{num_waiting} waiting",
        "running": num_seqs,
        **summary(times),
        "add_us": round(statistics.median(add), 1),
        "abort_us": round(statistics.median(abort), 1),
    }


def long_prompt(length: int, repeats: int) -> dict[str, Any]:
    """Measure a prompt whose blocks are all cached: its admission, its end, and its hashing in the frontend."""
    loop = Loop(4, length + BLOCK_SIZE + 4)
    request = loop.request(length, 1)
    times, ends, hashing = [], [], []
    for index in range(repeats + 1):
        copy = msgspec.structs.replace(request, request_index=index)
        start = time.perf_counter()
        loop.scheduler.add_request(0, copy, 0.0)
        step = loop.scheduler.schedule(0.0)
        times.append((time.perf_counter() - start) * 1e6)
        assert step is not None
        result = ModelRunnerOutput(step.step, int32_bytes([1]))
        start = time.perf_counter()
        loop.scheduler.update_from_output(step, result, 0.0)
        ends.append((time.perf_counter() - start) * 1e6)
        token_ids = np.frombuffer(request.prompt_token_ids, np.int32)
        start = time.perf_counter()
        hash_blocks(token_ids, BLOCK_SIZE, root_hash())
        hashing.append((time.perf_counter() - start) * 1e6)
    hits = times[1:]
    return {
        "case": f"full hit of {length} tokens",
        **summary(hits),
        "end_us": round(statistics.median(ends), 1),
        "hashing_us": round(statistics.median(hashing), 1),
    }


def snapshots(num_running: int, num_waiting: int, num_blocks: int, steps: int) -> dict[str, Any]:
    """Measure the ends of turns, in which the event log captures the state once in some hundred steps.

    Four requests arrive and end per step, and all blocks are cached.
    """
    loop = Loop(num_running, 2048, num_blocks=num_blocks)
    scheduler = loop.scheduler
    assert isinstance(scheduler, RecordedScheduler)
    pool = scheduler.scheduler.kv_cache_manager.pool
    while pool.num_blank > num_running * 8:
        loop.add(2000, 1)
        loop.run()
    lifetime = num_running // 4
    for index in range(num_running):
        loop.add(500, 1 + index // 4)
    for _ in range(num_waiting):
        loop.add(500, lifetime)
    loop.send()
    arrivals = iter([loop.request(500, lifetime) for _ in range(4 * (steps + 20))])
    captures: list[float] = []
    gc.collect()
    gc.freeze()
    for step in range(steps + 20):
        for _ in range(4):
            scheduler.add_request(0, next(arrivals), 0.0)
        loop.run()
        last = scheduler.log.segments[-1]
        start = time.perf_counter()
        scheduler.end_turn()
        us = (time.perf_counter() - start) * 1e6
        if scheduler.log.segments[-1] is not last and step > 20:
            captures.append(us)
    gc.unfreeze()
    return {
        "case": f"snapshots of {num_blocks} blocks with {num_waiting} waiting",
        "running": num_running,
        "number": len(captures),
        **summary(captures),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", default="1,16,64,256,1024,4096")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument(
        "--no-event-log", action="store_true", help="measure the scheduler without its event log"
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="Python interpreter of vLLM's environment",
    )
    args = parser.parse_args()
    global RECORDED
    RECORDED = not args.no_event_log
    if args.vllm_python:
        vllm = Child(args.vllm_python, "vllm_scheduler.py")
        for num_seqs in map(int, args.running.split(",")):
            report(beside_vllm(vllm, num_seqs, args.steps, args.prompt))
        return
    for num_seqs in map(int, args.running.split(",")):
        report(decode_repeatedly(num_seqs, args.steps, args.prompt))
    for num_seqs in (1, 64, 256):
        report(decode_with_drafts(num_seqs, args.steps, args.prompt))
    for num_seqs, events, prompt in ((1024, 100, 32), (1024, 100, 512), (256, 1, 32)):
        report(churn(num_seqs, args.steps, events, prompt))
    report(many_waiting(256, args.steps, 100_000))
    report(long_prompt(32_768, 50))
    for num_waiting in (0, 1000, 9000):
        report(snapshots(256, num_waiting, 131_072, 10 * args.steps))


def report(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
