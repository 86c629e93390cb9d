"""Attention that runs outside of captured graphs.

Shapes: T tokens of a step, padded to a graph's size, of which the first `num_tokens` are real; H heads, K dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import AttentionBatch
from ..device.cuda_graphs import GraphBreaker
from ..layers.layers import HeadNorm
from ..layers.rope import RotaryTables
from .interface import AttentionBackend, AttentionLayer


@dataclass(slots=True)
class CurrentMetadata:
    """The metadata of the current step, which captured code reads."""

    num_tokens: int = 0
    value: Any = None


class BreakingAttention(AttentionBackend):
    """Wraps `backend`. With `CurrentMetadata`, its calls are excluded from the graph being captured."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.spec)
        self.breaker = GraphBreaker()
        self.backend = backend
        # All layers of all graphs write here, because a layer's result is read before the next layer writes.
        self._attended_THK = torch.empty(0)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the wrapped backend's shape."""
        return self.backend.kv_cache_shape(num_blocks)

    def build(self, batch: AttentionBatch, windows: Collection[int | None]) -> Any:
        """Return the wrapped backend's metadata."""
        return self.backend.build(batch, windows)

    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> Tensor:
        """Compute the wrapped backend's attention, outside of graphs if the metadata is `CurrentMetadata`."""
        if not isinstance(metadata, CurrentMetadata):
            return self.backend.forward(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer)

        def attend(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
            return self.backend.forward(q_THK, k_TGK, v_TGK, kv_cache, metadata.value, layer)

        return self._outside_of_graphs(attend, metadata, q_THK, k_TGK, v_TGK)

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
        """Norm, rotate and attend with the wrapped backend, outside of graphs if the metadata is `CurrentMetadata`."""
        if not isinstance(metadata, CurrentMetadata):
            return self.backend.forward_projected(
                qk_THK, v_TGK, head_norm, tables, kv_cache, metadata, layer
            )

        def attend(qk_THK: Tensor, v_TGK: Tensor, *cos_and_sin: Tensor) -> Tensor:
            tables = RotaryTables(*cos_and_sin) if cos_and_sin else None
            return self.backend.forward_projected(
                qk_THK, v_TGK, head_norm, tables, kv_cache, metadata.value, layer
            )

        return self._outside_of_graphs(attend, metadata, qk_THK, v_TGK, *(tables or ()))

    def _outside_of_graphs(
        self, attend: Callable[..., Tensor], metadata: CurrentMetadata, *tensors: Tensor
    ) -> Tensor:
        """Run `attend` on the real tokens of tensors [T, ...], now and in each replay; returns [T, H, K]."""
        num_tokens = len(tensors[0])
        if num_tokens > len(self._attended_THK):
            assert not self.breaker.is_capturing, "the largest graph runs before it is captured"
            shape = (num_tokens, self.num_heads, self.head_dim)
            self._attended_THK = tensors[0].new_zeros(shape)
        attended_THK = self._attended_THK[:num_tokens]

        def run(*tensors: Tensor) -> None:
            real = slice(metadata.num_tokens)
            attended_THK[real] = attend(*(tensor[real] for tensor in tensors))

        if self.breaker.is_capturing:
            self.breaker.run_eagerly(run, *tensors)
        else:
            run(*tensors)
        return attended_THK
