"""Number of kernel launches in a step. Each takes a microsecond or two, which counts for a small model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engine.protocol.config import (
    CacheConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
)
from engine.workers.attention.triton_paged import TritonPagedAttention
from engine.workers.cuda.layers import TritonKernels
from engine.workers.execution import torch_loader
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.loaders import DummyCheckpoint
from support.gpu.host_accelerator import HostAccelerator
from support.gpu.launches import META, launches
from support.gpu.taped_graphs import TapedGraphs

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


class NotedGraphs(TapedGraphs):
    """Graphs that record the kernels launched during the last capture."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names
        self.kernels: Counter[str] = Counter()

    def begin(self) -> None:
        super().begin()
        self._names.clear()

    def end(self) -> Any:
        self.kernels = Counter(self._names)
        return super().end()


def decode_kernels(path: Path, monkeypatch, num_layers: int) -> Counter[str]:
    """Return the kernels of a decode graph for one request."""
    (path / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": num_layers}))
    monkeypatch.setattr(torch_loader, "attention_backend", TritonPagedAttention)
    kernels = TritonKernels(torch.bfloat16, has_float8=True)
    monkeypatch.setattr(torch_loader, "layer_kernels", lambda *_: kernels)
    model = ModelConfig(
        "m", str(path), str(path), ("m",), "qwen3", 512, 1024, (1,), load_format=LoadFormat.DUMMY
    )
    config = EngineConfig(
        "/run",
        1,
        model,
        CacheConfig(block_size=16),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8),
    )
    accelerator = HostAccelerator()
    with launches(monkeypatch) as names:
        accelerator.graphs = graphs = NotedGraphs(names)
        runner = ModelRunner(
            config, META, DummyCheckpoint(path), lambda *_: None, accelerator=accelerator
        )
        runner.allocate_kv_cache(9)
        runner.warm_up()
    # Graphs for decodes are captured last, and that for a single one last of all.
    return graphs.kernels


def test_decode_launches_the_expected_kernels_per_layer(tmp_path: Path, monkeypatch) -> None:
    one, three = (decode_kernels(tmp_path, monkeypatch, n) for n in (1, 3))
    assert (three - one) == Counter(
        {
            "linear": 8,
            "_norm_kernel": 4,
            "rotary_store_kernel": 2,
            "decode_kernel": 2,
            "combine_kernel": 2,
            "_gated_kernel": 2,
        }
    )
    assert one.total() - (three - one).total() // 2 == 11
