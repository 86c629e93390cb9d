"""Launch every kernel of triton_paged for the shapes of well-known models, for a check of the compiler."""

from typing import NamedTuple

import torch
from engine.workers.attention import AttentionLayer, AttentionSpec, DeviceBatch
from engine.workers.attention.batch_invariant import BatchInvariantAttention
from engine.workers.attention.triton_paged import TritonPagedAttention
from engine.workers.layers.layers import HeadNorm
from engine.workers.layers.rope import RotaryTables
from engine.workers.layers.window import Chunk, Window
from support.workers.batches import Scheduled, attention_batch


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: Window | None = None
    softcap: float | None = None
    has_head_norm: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    latent_rank: int = 0


SHAPES = {
    "Llama-3.1-8B": Shape(32, 8, 128, 128),
    "Qwen3-8B, FP8 cache": Shape(32, 8, 128, 128, torch.float8_e4m3fn, has_head_norm=True),
    "phi-2": Shape(32, 32, 80, 32),
    "Qwen3-0.6B, float32": Shape(16, 8, 128, 128, torch.float32, has_head_norm=True),
    "gemma-2-9b": Shape(16, 8, 256, 256, window=4096, softcap=50.0),
    "gpt-oss-20b": Shape(64, 8, 64, 64, window=128, has_sinks=True),
    "bloom-7b1": Shape(32, 32, 128, 128, has_alibi=True),
    "DeepSeek-V3": Shape(128, 1, 576, 0, latent_rank=512),
    "DeepSeek-V3, FP8 cache": Shape(128, 1, 576, 0, torch.float8_e4m3fn, latent_rank=512),
    "DeepSeek-V2-Lite, float32": Shape(16, 1, 576, 0, torch.float32, latent_rank=512),
    "Llama-4-Scout": Shape(40, 8, 128, 128, window=Chunk(8192)),
}


def launch(shape: Shape, backend_class: type[TritonPagedAttention]) -> None:
    """Launch a step of one request in the middle of its prompt and one that decodes."""
    block_size = 16
    spec = AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=shape.dtype,
        device=torch.device("cpu"),
        reads_distances=shape.has_alibi,
        latent_rank=shape.latent_rank,
    )
    backend = backend_class(spec)
    requests = [Scheduled(10, 20, [1, 2]), Scheduled(300, 1, range(3, 22))]
    batch = attention_batch(requests, block_size)
    metadata = backend.build(batch, {shape.window})
    arrays = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
    device_batch = DeviceBatch(*map(torch.from_numpy, arrays))
    backend.build_captured(device_batch, {shape.window}, 20)
    num_heads = shape.num_heads + shape.num_kv_heads
    dtype = torch.float32 if shape.dtype == torch.float32 else torch.bfloat16
    qkv_THK = torch.zeros(21, num_heads + shape.num_kv_heads, shape.head_dim, dtype=dtype)
    qk_THK, v_TGK = qkv_THK.split((num_heads, shape.num_kv_heads), 1)
    table = torch.zeros(21, 1, shape.rotary_dim, dtype=dtype)
    norm = HeadNorm(torch.ones(num_heads, shape.head_dim), 1e-6)
    of_heads = torch.ones(shape.num_heads)
    has_scales = shape.dtype.itemsize == 1 and not shape.latent_rank
    scales = torch.ones(2, shape.num_kv_heads) if has_scales else None
    backend.forward_projected(
        qk_THK,
        v_TGK,
        norm if shape.has_head_norm else None,
        RotaryTables(table, table) if shape.rotary_dim else None,
        torch.zeros(backend.kv_cache_shape(22), dtype=shape.dtype),
        metadata,
        AttentionLayer(
            shape.head_dim**-0.5,
            shape.window,
            shape.softcap,
            scales,
            of_heads if shape.has_alibi else None,
            of_heads if shape.has_sinks else None,
        ),
    )


BATCH_INVARIANT = ("Qwen3-8B, FP8 cache", "gpt-oss-20b")
"""Batch invariance changes only the number of partitions, which few shapes are needed for."""


def launch_shape(name: str) -> None:
    launch(SHAPES[name], TritonPagedAttention)
    if name in BATCH_INVARIANT:
        launch(SHAPES[name], BatchInvariantAttention)
