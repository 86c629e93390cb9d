"""Measure the parts of a step: the native program's operations, the worker around them, and serving.

    scripts/bench/run step_profile [--model PATH] [--streams 1,64] [--context 192]

The first two are measured by running decode steps on a worker's model runner in this process. Serving is the time
between two tokens of a stream from `engine serve`, with the same number of streams and, on average, the same context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.loaders import open_checkpoint
from side_by_side.contenders import engine_contender
from side_by_side.points import Point
from side_by_side.running import run
from support.servers.server import default_model

BLOCK_SIZE = 16
PREFILL_TOKENS = 2048
AFTER = {
    "embed": "embedding, rope tables",
    "quantize": "norms",
    "rotate_store": "rope, KV write",
    "attention": "attention",
    "gated_linear": "gate, up, activation",
    "route": "router",
    "gated_experts": "experts: gate, up, activation",
    "expert_outputs": "experts: down",
    "combine_experts": "experts: sum",
    "short_convolution": "recurrent layers",
    "convolve": "recurrent layers",
    "scan": "recurrent layers",
    "gate_mixed": "recurrent layers",
    "norm_add": "norms",
    "final_norm": "norms",
    "head": "head",
    "sample": "sampling",
}


class Decoding:
    """A model runner whose `streams` requests decode, each with a context of `context` tokens."""

    def __init__(
        self,
        model: str,
        streams: int,
        context: int,
        steps: int,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        max_model_len = -(-(context + steps + 2) // BLOCK_SIZE) * BLOCK_SIZE
        resolved = resolve_model(ModelOptions(model=model, max_model_len=max_model_len), Console())
        config = EngineConfig(
            "",
            1,
            resolved.config,
            CacheConfig(block_size=BLOCK_SIZE),
            SchedulerConfig(max_num_seqs=streams, speculative=speculative),
        )
        checkpoint = open_checkpoint(resolved.config.path)
        self.runner = ModelRunner(config, torch.device("cpu"), checkpoint, lambda done, total: None)
        if not isinstance(self.runner.model, NativeDecoder):
            raise SystemExit(
                "only the native CPU backend measures its operations, and it cannot run this model"
            )
        self.model = self.runner.model
        self._blocks = max_model_len // BLOCK_SIZE
        self._num_steps = 0
        self.runner.allocate_kv_cache(1 + streams * self._blocks)
        rng = np.random.default_rng(1)
        for slot in range(streams):
            prompt = rng.integers(1000, resolved.config.vocab_size // 4, context)
            self._prefill(slot, prompt.astype(np.int32))
        self.step(slots=int32_bytes(range(streams)))

    def step(self, **fields: Any) -> None:
        self._num_steps += 1
        self.runner.execute(SchedulerOutput(self._num_steps, **fields), lambda step: None)

    def _prefill(self, slot: int, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        first = 1 + slot * self._blocks
        request = NewRequestData(
            slot=slot,
            request_id=(0, slot),
            token_ids=int32_bytes(prompt),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=(int32_bytes(range(first, first + self._blocks)),),
            sampling_params=SamplingParams(temperature=0, ignore_eos=True),
        )
        new, slots = [request], int32_bytes([slot])
        for start in range(0, len(prompt), PREFILL_TOKENS):
            chunk = int32_bytes([0, min(PREFILL_TOKENS, len(prompt) - start)])
            self.step(new_requests=new, slots=slots, chunks=chunk)
            new = []


def named_operations(profile: list[tuple[str, float]]) -> dict[str, float]:
    """Return seconds by purpose of the operations. A product is named by the operations before and after it."""
    seconds: dict[str, float] = defaultdict(float)
    kinds = ["", *(kind for kind, _ in profile), ""]
    for (kind, spent), previous, following in zip(profile, kinds, kinds[2:], strict=False):
        if kind != "linear":
            name = AFTER[kind]
        elif following == "route":
            name = "router"
        else:
            name = {"attention": "attention output", "gated_linear": "down"}.get(previous, "qkv")
        seconds[name] += spent
    return seconds


def profile_steps(model: str, streams: int, context: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a decode step by part, as medians over `steps`."""
    decoding = Decoding(model, streams, context - steps // 2, steps)
    spent: dict[str, list[float]] = defaultdict(list)
    before = named_operations(decoding.model.profile())
    for _ in range(steps):
        begin = time.perf_counter()
        decoding.step()
        total = time.perf_counter() - begin
        after = named_operations(decoding.model.profile())
        parts = {name: after[name] - before[name] for name in after}
        parts["worker, between native calls"] = total - sum(parts.values())
        for name, seconds in parts.items():
            spent[name].append(1e3 * seconds)
        before = after
    return {name: statistics.median(times) for name, times in spent.items()}


def served_ms(model: str, streams: int, context: int) -> float:
    """Return the median milliseconds between two tokens of a stream."""
    point = Point(context // 2, context, streams, streams)
    with run(engine_contender(Path(model)), Path("/dev/null")) as running:
        figures = [running.measure(point, seed)["itl_ms_p50"] for seed in range(3)]
    return float(statistics.median(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", default=None, help="model to measure (default: the default model)"
    )
    parser.add_argument("--streams", default="1,64", help="comma-separated")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-serving", action="store_true", help="measure only this process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = arguments.model or default_model()
    report = {}
    for streams in map(int, arguments.streams.split(",")):
        parts = profile_steps(model, streams, arguments.context, arguments.steps)
        if not arguments.no_serving:
            served = served_ms(model, streams, arguments.context)
            parts["core, frontend, client"] = served - sum(parts.values())
        report[streams] = parts
    if arguments.json:
        print(json.dumps(report))
        return
    for streams, parts in report.items():
        total = sum(parts.values())
        print(f"{streams} streams, {arguments.context} tokens of context: {total:.2f} ms a step")
        for name, spent in sorted(parts.items(), key=lambda part: -part[1]):
            print(f"  {name:30s} {spent:8.3f} ms {100 * spent / total:6.1f} %")


if __name__ == "__main__":
    main()
