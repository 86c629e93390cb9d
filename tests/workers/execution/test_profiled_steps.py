"""No step needs more GPU memory than the profiled steps that size the KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import GrammarOutput, NewRequestData, SchedulerOutput
from engine.workers.attention.triton_paged import TritonPagedAttention
from engine.workers.cuda.layers import TritonKernels
from engine.workers.execution import torch_loader
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.loaders import DummyCheckpoint
from support.gpu.host_accelerator import HostAccelerator
from support.gpu.launches import META, launches
from support.workers.live_memory import LiveMemory

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
NUM_REQUESTS = 8
LONG = 6000


class Accelerator(HostAccelerator):
    def __init__(self, live: LiveMemory) -> None:
        super().__init__()
        self._live = live

    def allocated_memory(self) -> int:
        return self._live.now

    def reset_peak(self) -> None:
        self._live.peak = self._live.now

    def peak_memory(self) -> int:
        return self._live.peak


@pytest.mark.parametrize(
    ("vocab_size", "features"),
    [
        (512, {}),
        (32000, {"allowed_token_ids": (3, 4), "logprobs": 1, "top_p": 0.5}),
    ],
    ids=["long sequences", "limited tokens"],
)
def test_decodes_with_a_prompt_chunk_need_no_more_than_the_profile(
    tmp_path: Path, monkeypatch, vocab_size: int, features: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": vocab_size}))
    monkeypatch.setattr(torch_loader, "attention_backend", TritonPagedAttention)
    kernels = TritonKernels(torch.bfloat16, has_float8=True)
    monkeypatch.setattr(torch_loader, "layer_kernels", lambda *_: kernels)
    path = str(tmp_path)
    model = ModelConfig(
        "m", path, path, ("m",), "qwen3", vocab_size, 8192, (1,), load_format=LoadFormat.DUMMY
    )
    config = EngineConfig(
        "/run",
        1,
        model,
        CacheConfig(block_size=16),
        SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=64),
        device=DeviceConfig(enforce_eager=True),
    )
    with launches(monkeypatch), LiveMemory(META) as live:
        accelerator = Accelerator(live)
        runner = ModelRunner(
            config, META, DummyCheckpoint(path), lambda *_: None, accelerator=accelerator
        )
        profile = runner.profile_memory(0.9)
        assert profile is not None
        runner.allocate_kv_cache(NUM_REQUESTS * 512 + 1)
        before = live.now
        accelerator.reset_peak()

        def request(slot: int) -> NewRequestData:
            length = 56 if slot == 0 else LONG
            return NewRequestData(
                slot=slot,
                request_id=(0, slot),
                token_ids=int32_bytes([5] * length),
                num_prompt_tokens=length,
                num_computed_tokens=0 if slot == 0 else LONG - 1,
                block_ids=(int32_bytes(range(1 + 512 * slot, 1 + 512 * (slot + 1))),),
                sampling_params=SamplingParams(temperature=1, seed=1, **features),
            )

        slots = int32_bytes(range(NUM_REQUESTS))
        limited = int32_bytes(range(1, NUM_REQUESTS))
        words = int32_bytes([-1] * (vocab_size // 32) * (NUM_REQUESTS - 1))
        step = SchedulerOutput(
            1,
            new_requests=[request(slot) for slot in range(NUM_REQUESTS)],
            slots=slots,
            chunks=int32_bytes([0, 56]),
            grammar_slots=limited if features else b"",
        )
        runner.execute(step, lambda step: GrammarOutput(step, words))
        assert 0 < live.peak - before <= profile.activations
