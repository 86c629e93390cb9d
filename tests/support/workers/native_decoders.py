"""Native and torch decoders of small specs, with the same weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.protocol.sampling_params import SamplingParams
from engine.workers.attention import AttentionSpec, attention_backend
from engine.workers.batch import PersistentBatch
from engine.workers.cpu.attention import NativeAttention
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.layers.rope import RopeSpec
from engine.workers.layers.spec import ModelSpec
from engine.workers.layers.specs.latent import LatentSpec
from engine.workers.loaders.checkpoint import Checkpoint
from engine.workers.models.decoder import Decoder
from engine.workers.sampling import SamplerOutput
from support.checkpoints.random import random_checkpoint
from support.workers.batches import Scheduled, attention_batch, positions

CPU = torch.device("cpu")
ROPE = RopeSpec(10_000.0, 16)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096


def small_spec(**differences: Any) -> ModelSpec:
    """A Llama of three layers, whose rows are whole groups of 32."""
    llama: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "layers": (LayerSpec(ROPE),) * 3,
        "max_position_embeddings": MAX_MODEL_LEN,
        "norm_eps": 1e-6,
        "attention_scale": 32**-0.5,
        "tie_word_embeddings": True,
    }
    return ModelSpec(**llama | differences)


def latent_spec(query_rank: int | None = None, **differences: Any) -> ModelSpec:
    """Three layers with latent attention."""
    latent = LatentSpec(query_rank, kv_rank=64, plain_dim=32, rotary_dim=16, value_dim=32)
    return small_spec(
        **{"num_kv_heads": 1, "head_dim": 80, "latent": latent, "attention_scale": 48**-0.5}
        | differences
    )


def native_decoder(
    spec: ModelSpec,
    source: Path | Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> NativeDecoder:
    """Load from a checkpoint, or from a random one written to a folder."""
    checkpoint = random_checkpoint(source, spec) if isinstance(source, Path) else source
    return NativeDecoder(
        spec,
        checkpoint,
        NativeAttention(_attention_spec(spec, cache_dtype, block_size)),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )


def torch_decoder(spec: ModelSpec, checkpoint: Checkpoint, **options: Any) -> Decoder:
    """Load the torch decoder in float32."""
    return Decoder(
        spec,
        checkpoint,
        attention_backend(_attention_spec(spec, torch.float32)),
        dtype=torch.float32,
        device=CPU,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )


def _attention_spec(
    spec: ModelSpec, dtype: torch.dtype, block_size: int = BLOCK_SIZE
) -> AttentionSpec:
    shard = ModelShard.whole(spec)
    return AttentionSpec.from_model(spec, shard, block_size=block_size, dtype=dtype, device=CPU)


def forward_and_sample(
    decoder: NativeDecoder | Decoder,
    tokens: list[int],
    rows: Sequence[int],
    params: Sequence[SamplingParams],
) -> tuple[torch.Tensor, SamplerOutput]:
    """Return the logits of those rows of a prompt, and the token that a request samples after each.

    The keys and values that both calls store must be the same.
    """
    batch = PersistentBatch(len(rows), MAX_MODEL_LEN, BLOCK_SIZE, 1, CPU)
    sampler = decoder.make_sampler(batch)
    for slot, (row, each) in enumerate(zip(rows, params, strict=True)):
        prompt = np.array(tokens[:row], np.int32)
        sampler.add_request(slot, each, prompt, ())
        batch.token_ids_NL[slot, :row] = torch.from_numpy(prompt)
        batch.num_tokens[slot] = batch.num_prompt_tokens[slot] = row
    rows_S = np.array(rows, np.int32)
    slots_S = np.arange(len(rows), dtype=np.int32)
    inputs, others = _prompt_inputs(decoder, tokens), _prompt_inputs(decoder, tokens)
    sampled = decoder.forward_and_sample(*inputs, rows_S, slots_S)
    hidden = decoder.forward(*others)
    for stored, expected in zip(inputs[2], others[2], strict=True):
        # Bits are compared, because NaNs differ from themselves.
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    return decoder.compute_logits(hidden[rows_S]), sampled


def _prompt_inputs(decoder: NativeDecoder | Decoder, tokens: list[int]) -> tuple[Any, ...]:
    """Return the arguments of `forward` for one prompt on an empty KV cache."""
    blocks = list(range(1, 2 + len(tokens) // BLOCK_SIZE))
    scheduled = [Scheduled(0, len(tokens), blocks)]
    batch = attention_batch(scheduled, BLOCK_SIZE)
    shape = decoder.attention.kv_cache_shape(len(blocks) + 1)
    return (
        torch.tensor(tokens),
        positions(scheduled),
        [torch.zeros(shape, dtype=decoder.attention.dtype) for _ in decoder.spec.layers],
        [decoder.attention.build(batch, windows) for windows in decoder.spec.windows_by_group],
    )
