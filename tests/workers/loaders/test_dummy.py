"""Dummy weights, and weights that are uploaded to a device in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.protocol.errors import CheckpointError, ConfigError
from engine.workers.attention import AttentionSpec
from engine.workers.attention.torch_paged import TorchPagedAttention
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.layers.parallel.tensor_parallel import TensorParallel
from engine.workers.layers.spec import ModelSpec
from engine.workers.loaders import DummyCheckpoint
from engine.workers.loaders.upload import PinnedUpload
from engine.workers.models.decoder import Decoder
from engine.workers.models.families import model_spec

META = torch.device("meta")
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


class CountedTensors(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that `empty` and similar functions allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "ones", "zeros"):
            self.num_bytes += result.nbytes
        return result


class ShapesOfAttention(TorchPagedAttention):
    """Attention that checks the shapes for 7 tokens."""

    def forward(self, q_THK, k_TGK, v_TGK, kv_cache, metadata, layer, index=None):
        assert q_THK.shape == (7, 32, 128) and k_TGK.shape == v_TGK.shape == (7, 8, 128)
        assert q_THK.dtype is k_TGK.dtype is v_TGK.dtype is torch.bfloat16
        return torch.empty_like(q_THK)


def dummy_decoder(path: Path, config: dict, shard: ModelShard | None = None):
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = DummyCheckpoint(path)
    spec: ModelSpec = model_spec(checkpoint.config, path)
    shard = shard or ModelShard.whole(spec)
    attention = AttentionSpec.from_model(
        spec, shard, block_size=16, dtype=torch.bfloat16, device=META
    )
    decoder = Decoder(
        spec,
        checkpoint,
        ShapesOfAttention(attention),
        dtype=torch.bfloat16,
        device=META,
        max_model_len=8192,
        shard=shard,
    )
    return decoder, spec


@pytest.mark.parametrize("size", [1, 4])
def test_an_8b_model_allocates_the_bytes_of_its_parameters(tmp_path: Path, size: int) -> None:
    spec = model_spec(LLAMA_8B, tmp_path)
    shard = ModelShard.from_stage(spec, 0, 1, TensorParallel(1 if size > 1 else 0, size))
    with CountedTensors() as tensors:
        decoder, _ = dummy_decoder(tmp_path, LLAMA_8B, shard)
    shared = 2 * 128256 * 4096 + 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    # Norms are float32.
    norms = 65 * 4096
    assert tensors.num_bytes == 2 * (shared // size) + 4 * norms
    block_bytes = 2 * 16 * (8 // size) * 128 * 2
    shape = decoder.attention.kv_cache_shape(1)
    assert torch.empty(shape, dtype=torch.bfloat16, device=META).nbytes == block_bytes


def test_shapes_and_dtypes_of_an_8b_model_match_throughout_a_step(
    tmp_path: Path,
) -> None:
    decoder, spec = dummy_decoder(tmp_path, LLAMA_8B)
    ids_T = torch.zeros(7, dtype=torch.int32, device=META)
    hidden_TD = decoder.forward(ids_T, ids_T, [ids_T] * len(spec.layers), [None])
    assert hidden_TD.shape == (7, 4096) and hidden_TD.dtype is torch.bfloat16
    logits_SV = decoder.compute_logits(hidden_TD[:2])
    assert logits_SV.shape == (2, 128256) and logits_SV.dtype is torch.float32


def test_dummy_weights_require_a_directory_with_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        DummyCheckpoint(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        DummyCheckpoint(tmp_path)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (16,), (5, 13), (3, 0)])
def test_an_upload_in_parts_equals_the_converted_tensor(shape: tuple[int, ...]) -> None:
    upload = PinnedUpload(torch.device("cpu"), staging_bytes=16)
    generator = torch.Generator().manual_seed(1)
    for source in (torch.randn(shape, generator=generator) for _ in range(3)):
        uploaded = upload(source, torch.bfloat16)
        assert torch.equal(uploaded, source.bfloat16()) and uploaded.is_contiguous()
    transposed = torch.randn(4, 6, generator=generator).T
    assert torch.equal(upload(transposed, torch.float32), transposed)
