"""OpenVINO GenAI's continuous batching, without a server. It reads points and writes figures, one JSON line each.

    python openvino_child.py MODEL_DIRECTORY THREADS CACHE_GIB MAX_STREAMS

Runs in OpenVINO's own environment and imports nothing else of this repository.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Pipeline:
    def __init__(self, model: str, threads: int, cache_gib: int, max_streams: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = max_streams
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self._next_id = 0

    def measure(self, point: dict[str, int]) -> dict[str, float]:
        """Measure one point. Times are in milliseconds, rates in tokens per second."""
        generation = openvino_genai.GenerationConfig()
        generation.ignore_eos, generation.do_sample = True, False
        generation.max_new_tokens = point["output"]
        rng = np.random.default_rng(point["seed"])

        def ids(count: int) -> list[int]:
            return list(map(int, rng.integers(1000, 40_000, count)))

        head = ids(point["shared"])
        prompts = [head + ids(point["prompt"]) for _ in range(point["requests"])]
        live: dict[int, tuple[Any, float]] = {}
        first: dict[int, float] = {}
        begin = time.perf_counter()
        while prompts or live:
            while prompts and len(live) < point["concurrency"]:
                prompt = openvino.Tensor(np.array([prompts.pop()], np.int64))
                handle = self._pipeline.add_request(self._next_id, prompt, generation)
                live[self._next_id] = (handle, time.perf_counter())
                self._next_id += 1
            self._pipeline.step()
            now = time.perf_counter()
            for number, (handle, start) in list(live.items()):
                if handle.can_read():
                    handle.read()
                    first.setdefault(number, now - start)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del live[number]
        wall = time.perf_counter() - begin
        output = point["requests"] * point["output"]
        prompt_tokens = point["requests"] * (point["prompt"] + point["shared"])
        return {
            "wall_s": wall,
            "failed": 0,
            "output_tok_s": output / wall,
            "total_tok_s": (output + prompt_tokens) / wall,
            "ttft_ms_p50": float(np.median(list(first.values()))) * 1e3,
        }


def main() -> None:
    model, *numbers = sys.argv[1:]
    pipeline = Pipeline(model, *map(int, numbers))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(pipeline.measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
