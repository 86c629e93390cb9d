"""What the model and the worker know of attention.

S scheduled requests, T their tokens of this step, B blocks a row of the block table, H query heads,
G key/value heads, K head dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.layers import HeadNorm
from ..models.rope import RotaryTables, apply_rotary
from ..models.shard import ModelShard
from ..models.spec import ModelSpec

NULL_BLOCK = 0
"""Pads the rows of the block table; it belongs to no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The heads and the KV cache of one worker's attention, the same in all layers.

    `dtype` is that of the KV cache; queries, keys and values may come in another.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        shard: ModelShard,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return the spec for the heads of the model that `shard` has."""
        return cls(
            num_heads=len(shard.heads(model)),
            num_kv_heads=len(shard.kv_heads(model)),
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What distinguishes one layer's attention from another's.

    Scores are q.k * scale, then softcap * tanh(score / softcap) if there is a soft cap. A token at
    position p sees positions p - window + 1 .. p, or 0 .. p without a window. In an FP8 cache, keys
    and values are divided by `kv_scales_2G`, float32 on the device, each head's.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_scales_2G: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's requests as `AttentionBatch` has them, int32 on the device, at addresses that stay.

    Padding requests have no tokens and a `seq_lens` of 0; the `slot_mapping` of a padding token is -1.
    """

    query_start_loc: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]
    block_table: Tensor  # [S, B]
    slot_mapping: Tensor  # [T]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests, as one KV-cache group sees them.

    Request i has the tokens `query_start_loc[i] : query_start_loc[i + 1]` of the step; they are the
    last of its `seq_lens[i]` tokens, and at least one. `block_table` may be wider than needed;
    entries past the sequence are not read. `slot_mapping` is where each token's keys and values go:
    block id * block size + offset.
    """

    query_start_loc: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S], after this step
    block_table: NDArray[np.int32]  # [S, B]
    slot_mapping: NDArray[np.int32]  # [T]


class PagedAttention(ABC):
    """The KV cache of one way to compute attention on one device, and what a step tells it.

    The layers have `spec` in common, and differ in `AttentionLayer`.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.block_size = spec.block_size
        self.dtype = spec.dtype
        self.device = spec.device

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache: contiguous, in `dtype`, its first dimension the block.

        It must be allocated with zeros.
        """

    @abstractmethod
    def build(self, batch: AttentionBatch, windows: Collection[int | None]) -> Any:
        """Return the metadata of one step for a group whose layers have these windows."""


class AttentionBackend(PagedAttention):
    """Attention that a model calls layer by layer; a native program holds its own."""

    @abstractmethod
    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> Tensor:
        """Store the keys and values of the step's tokens, then return what they attend to [T, H, K]."""

    def forward_projected(
        self,
        qk_THK: Tensor,
        v_TGK: Tensor,
        head_norm: HeadNorm | None,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> Tensor:
        """As `forward`, of queries and keys [T, H + G, K] that are still to be normed and rotated."""
        if head_norm is not None:
            qk_THK = head_norm(qk_THK)
        if tables is not None:
            qk_THK = apply_rotary(qk_THK, tables)
        q_THK, k_TGK = qk_THK.split((self.num_heads, self.num_kv_heads), 1)
        return self.forward(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer)


class CapturableAttention(AttentionBackend):
    """Attention whose decoding can be captured in a graph."""

    @abstractmethod
    def build_decode(self, batch: DeviceBatch, windows: Collection[int | None]) -> Any:
        """Return metadata of any step in which each request has one token, or none, and `batch` describes them.

        With it, `forward` depends on the content of the device's tensors only, not on any number that the host knows.
        """
