"""A step never waits for the device. On `meta`, where tensors have no content, waiting would be an error."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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
from engine.workers.attention import CapturableAttention, DeviceBatch
from engine.workers.batch import AttentionBatch
from engine.workers.device.transfers import DownloadedOutput
from engine.workers.execution import torch_loader
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.loaders import DummyCheckpoint
from support.gpu.host_accelerator import HostAccelerator

pytestmark = pytest.mark.slow

META = torch.device("meta")
VOCAB_SIZE = 512
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


class NoAttention(CapturableAttention):
    """Attention without kernels, because these would read the metadata on the device."""

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def build(self, batch: AttentionBatch, windows: Collection[int | None]) -> AttentionBatch:
        return batch

    def build_captured(
        self, batch: DeviceBatch, windows: Collection[int | None], max_queries: int
    ) -> DeviceBatch:
        for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
            assert tensor.device == META and tensor.dtype is torch.int32
        return batch

    def forward(self, q_THK, k_TGK, v_TGK, kv_cache, metadata: Any, layer, index=None) -> Any:
        tensors = (q_THK, k_TGK, v_TGK, kv_cache)
        assert all(tensor.device == META for tensor in tensors)
        return torch.empty_like(q_THK)

    def store(self, k_TGK, v_TGK, kv_cache, metadata: Any, layer) -> None: ...

    def attend(self, q_THK, kv_cache, metadata: Any, layer) -> torch.Tensor:
        return torch.empty_like(q_THK)


class NothingArrives:
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == META
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def has_arrived(self) -> bool:
        return True

    def wait(self) -> None: ...


class MetaAccelerator(HostAccelerator):
    @contextmanager
    def download(self) -> Iterator[NothingArrives]:
        yield NothingArrives()


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=1, top_k=5),
    SamplingParams(temperature=1, seed=2, top_p=0.5, typical_p=0.9),
    SamplingParams(temperature=0.7, seed=3, min_p=0.1, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0, min_tokens=3, logit_bias={5: 1.0}, stop_token_ids=[9]),
    SamplingParams(temperature=0, allowed_token_ids=[4, 5, 6]),
    SamplingParams(temperature=0, bad_words_token_ids=((3, 4), (7,))),
]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_steps_of_any_kind_are_queued_without_waiting_for_the_device(
    tmp_path: Path, monkeypatch, enforce_eager: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    monkeypatch.setattr(torch_loader, "attention_backend", NoAttention)
    path = str(tmp_path)
    config = EngineConfig(
        "/run",
        1,
        ModelConfig(
            "m", path, path, ("m",), "qwen3", VOCAB_SIZE, 128, (1,), load_format=LoadFormat.DUMMY
        ),
        CacheConfig(block_size=16),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        device=DeviceConfig(enforce_eager=enforce_eager, max_cudagraph_capture_size=16),
    )
    runner = ModelRunner(
        config, META, DummyCheckpoint(path), lambda *_: None, accelerator=MetaAccelerator()
    )
    runner.profile_memory(0.9)
    runner.allocate_kv_cache(64)
    runner.warm_up()

    def new(slot: int, length: int) -> NewRequestData:
        return NewRequestData(
            slot=slot,
            request_id=(0, slot),
            token_ids=int32_bytes(range(5, 5 + length)),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=(int32_bytes([1 + slot, 9 + slot]),),
            sampling_params=PARAMS[slot],
            eos_token_ids=(1,),
        )

    def grammar(step: int) -> GrammarOutput:
        return GrammarOutput(step, int32_bytes([-1] * (VOCAB_SIZE // 32)))

    everyone = int32_bytes(range(7))
    steps: list[dict[str, Any]] = [
        {"new_requests": [new(0, 20)], "slots": int32_bytes([0]), "chunks": int32_bytes([0, 9])},
        {"chunks": int32_bytes([0, 11])},
        {},
        {
            "new_requests": [new(slot, 4) for slot in range(1, 7)],
            "slots": everyone,
            "chunks": int32_bytes([[row, 4] for row in range(1, 7)]),
        },
        {"block_updates": int32_bytes([[0, 2, 1, 40]])},
        {"slots": int32_bytes([1, 2])},
        {"slots": everyone, "grammar_slots": int32_bytes([1])},
        {"removed_slots": int32_bytes([3]), "slots": int32_bytes([0, 4])},
    ]
    for number, fields in enumerate(steps, 1):
        result = runner.execute(SchedulerOutput(number, **fields), grammar)
        assert isinstance(result, DownloadedOutput)
        assert result.output().step == number
