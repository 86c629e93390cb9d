"""The frame of an attention block with projections of its own.

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, K elements of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from ...attention import AttentionBackend, AttentionLayer
from ...layers.layer_spec import LayerSpec
from ...layers.rope import RotaryTables, apply_rotary
from ..layer_source import LayerSource

Attend: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of queries with keys [T, H + G, K], which it rotates, and values [T, G, K]; it returns [T, H, K].

A layer that reads the keys and values of another one has none of its own.
"""


class AttentionKind(ABC):
    """An attention block that computes queries, keys, values and its output in its own way."""

    qkv: Any = None
    """The projection of the block's input; None if a norm before the block must not round its output for it."""

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        spec, shard = source.spec, source.shard
        self._backend = backend.for_layer(spec, shard)
        self._layer = AttentionLayer(spec.attention_scale, layer.window)
        self._stores = layer.kv_source is None
        self._tensor_parallel = shard.tensor_parallel

    def forward(
        self,
        x_TD: Any,
        positions_T: Tensor,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
    ) -> Tensor:
        """Return the attention output [T, D] of a layer."""

        def attend(qk_THK: Tensor, v_TGK: Tensor) -> Tensor:
            if not self._stores:
                q_THK = qk_THK if tables is None else apply_rotary(qk_THK, tables)
                return self._backend.attend(q_THK, kv_cache, attn_metadata, self._layer)
            return self._backend.forward_projected(
                qk_THK, v_TGK, None, tables, kv_cache, attn_metadata, self._layer
            )

        return self._compute(x_TD, positions_T, attend)

    @abstractmethod
    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the output [T, D]."""
