"""Attention that runs outside of captured graphs.

Shapes: T tokens of a step, padded to a graph's size, of which the first `num_tokens` are real; H heads, V elements of a
value.
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
from ..layers.spec import Window
from .interface import AttentionBackend, AttentionLayer, AttentionSpec, IndexQueries


@dataclass(slots=True)
class CurrentMetadata:
    """A placeholder for the metadata of the current step, which captured code reads."""

    num_tokens: int = 0
    value: Any = None


class BreakingAttention(AttentionBackend):
    """Wraps `backend`. Calls with `CurrentMetadata` are excluded from the graph that is being captured."""

    def __init__(self, backend: AttentionBackend, breaker: GraphBreaker | None = None) -> None:
        super().__init__(backend.spec)
        self.breaker = breaker or GraphBreaker()
        self.backend = backend
        # All layers of all graphs write to this tensor. That is safe, because a layer's result is read before the next
        # one is written.
        self._attended_THV = torch.empty(0)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the wrapped backend's shape."""
        return self.backend.kv_cache_shape(num_blocks)

    def with_spec(self, spec: AttentionSpec) -> BreakingAttention:
        """Return the wrapped backend with another spec. Its calls are excluded from the same graphs."""
        return BreakingAttention(self.backend.with_spec(spec), self.breaker)

    def build(self, batch: AttentionBatch, windows: Collection[Window | None]) -> Any:
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

    def store(
        self,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> None:
        """Store keys and values with the wrapped backend. Graphs never do this."""
        self.backend.store(k_TGK, v_TGK, kv_cache, metadata, layer)

    def attend(
        self, q_THK: Tensor, kv_cache: Tensor, metadata: Any, layer: AttentionLayer
    ) -> Tensor:
        """Run `attend` of the wrapped backend, outside of graphs if the metadata is `CurrentMetadata`."""
        if not isinstance(metadata, CurrentMetadata):
            return self.backend.attend(q_THK, kv_cache, metadata, layer)

        def attend(q_THK: Tensor) -> Tensor:
            return self.backend.attend(q_THK, kv_cache, metadata.value, layer)

        return self._outside_of_graphs(attend, metadata, q_THK)

    def forward_sparse(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        index: IndexQueries | None,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> Tensor:
        """Run `forward_sparse` of the wrapped backend, outside of graphs if the metadata is `CurrentMetadata`."""
        if not isinstance(metadata, CurrentMetadata):
            return self.backend.forward_sparse(q_THK, k_TGK, index, kv_cache, metadata, layer)

        def attend(q_THK: Tensor, k_TGK: Tensor, *of_index: Tensor) -> Tensor:
            queries = None
            if index is not None:
                queries = IndexQueries(of_index[0], of_index[1], index.num_chosen)
            return self.backend.forward_sparse(
                q_THK, k_TGK, queries, kv_cache, metadata.value, layer
            )

        of_index = () if index is None else (index.queries_TJI, index.weights_TJ)
        return self._outside_of_graphs(attend, metadata, q_THK, k_TGK, *of_index)

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
        """Run `forward_projected` of the wrapped backend, outside of graphs if the metadata is `CurrentMetadata`."""
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
        """Run `attend` on the real tokens of tensors [T, ...], now and at each replay. Return [T, H, V]."""
        num_tokens = len(tensors[0])
        if num_tokens > len(self._attended_THV):
            assert not self.breaker.is_capturing, "the largest graph runs before it is captured"
            shape = (num_tokens, self.num_heads, self.value_dim)
            self._attended_THV = tensors[0].new_zeros(shape)
        attended_THV = self._attended_THV[:num_tokens]

        def run(*tensors: Tensor) -> None:
            real = slice(metadata.num_tokens)
            attended_THV[real] = attend(*(tensor[real] for tensor in tensors))

        if self.breaker.is_capturing:
            self.breaker.run_eagerly(run, *tensors)
        else:
            run(*tensors)
        return attended_THV
