"""Measure vLLM's own scheduler without a model, in the Python of an environment that has vLLM.

It answers as `child.Child` expects. A question is [running requests, prompt tokens, steps]. The answer has the
microseconds of each step, in which all requests decode: schedule() and update_from_output() together. As in Engine's
measurement, two steps are in flight and statistics are on. Nothing is encoded.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 32_000
HASH = "sha256"


@cache
def model_config() -> ModelConfig:
    """Return the configuration of a model that has no weights."""
    directory = Path(tempfile.mkdtemp(prefix="vllm-scheduler-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    try:
        return ModelConfig(model=str(directory), dtype="float32", skip_tokenizer_init=True)
    finally:
        file.unlink()
        directory.rmdir()


def make_scheduler(num_running: int, prompt: int) -> AsyncScheduler:
    num_blocks = num_running * (MAX_MODEL_LEN // BLOCK_SIZE) + 1
    # Every prompt is computed in the first step.
    budget = max(MAX_MODEL_LEN, num_running * (prompt + BLOCK_SIZE))
    cache_config = CacheConfig(
        block_size=BLOCK_SIZE, enable_prefix_caching=True, prefix_caching_hash_algo=HASH
    )
    config = VllmConfig(
        model_config=model_config(),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=True,
        ),
    )
    cache_config.num_gpu_blocks = num_blocks
    layer = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


class Loop:
    """The scheduler's work for each step, with a worker that answers immediately."""

    def __init__(self, num_running: int, prompt: int) -> None:
        self.num_running = num_running
        self.scheduler = make_scheduler(num_running, prompt)
        self.in_flight: deque[Any] = deque()
        hash_function = get_hash_fn_by_name(HASH)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        rng = random.Random(0)
        for index in range(num_running):
            length = prompt + index % BLOCK_SIZE
            request = Request(
                request_id=f"cmpl-{rng.getrandbits(128):032x}-{index}",
                prompt_token_ids=rng.choices(range(VOCAB_SIZE), k=length),
                sampling_params=vllm.SamplingParams(
                    temperature=0.0, max_tokens=MAX_MODEL_LEN - length, ignore_eos=True
                ),
                pooling_params=None,
                block_hasher=hasher,
            )
            self.scheduler.add_request(request)
        self.send()
        for _ in range(20):
            self.run()

    def send(self) -> float:
        start = time.perf_counter()
        step = self.scheduler.schedule()
        seconds = time.perf_counter() - start
        assert len(step.num_scheduled_tokens) == self.num_running
        self.in_flight.append(step)
        return seconds

    def take(self) -> float:
        step = self.in_flight.popleft()
        names = list(step.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[17] for _ in names],
        )
        start = time.perf_counter()
        self.scheduler.update_from_output(step, result)
        return time.perf_counter() - start

    def run(self) -> float:
        return self.send() + self.take()


def main() -> None:
    # vLLM's own output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    loops: dict[tuple[int, int], Loop] = {}
    for line in sys.stdin:
        num_running, prompt, steps = json.loads(line)
        key = num_running, prompt
        if key not in loops:
            loops.clear()
            loops[key] = Loop(*key)
        # vLLM's engine core does the same once it is up.
        gc.collect()
        gc.freeze()
        times = [round(1e6 * loops[key].run(), 1) for _ in range(steps)]
        gc.unfreeze()
        print(json.dumps({"version": vllm.__version__, "us": times}), file=answers, flush=True)


if __name__ == "__main__":
    main()
