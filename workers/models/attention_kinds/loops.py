"""Attention of a layer that is computed several times, and reads its first keys each time (IQuest-Coder Loop).

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, K head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention import AttentionBackend, AttentionLayer
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RotaryTables, apply_rotary
from ..layer_source import LayerSource


class LoopAttention:
    """Attention to all keys, and in later passes also to those of the pass within a window.

    A gate of each head, a product of its query, divides the output between both.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        spec, weights, prefix, shard, _ = source
        self._backend = backend.for_layer(spec, shard)
        self._all = AttentionLayer(spec.attention_scale)
        self._near = AttentionLayer(spec.attention_scale, spec.loop_window)
        heads, kv_heads, size = shard.heads(spec), shard.kv_heads(spec), spec.head_dim
        self._num_heads, self._num_kv_heads, self._size = len(heads), len(kv_heads), size
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = [elements(part, size) for part in (heads, kv_heads, kv_heads)]
        names = ["q_proj", "k_proj", "v_proj"]
        rows = weights.rows(prefix, names, [count * size for count in counts], parts)
        self.qkv = source.read_rows(rows, spec.hidden_size, is_adapted=True)
        total = spec.num_heads * size
        self._output = source.read_columns(
            "o_proj", spec.hidden_size, total, parts[0], is_adapted=True
        )
        gate, own = f"{prefix}loop_gate.", slice(heads.start, heads.stop)
        self._gate_HK = weights.read_float32(f"{gate}weight", spec.num_heads, size)[own]
        self._gate_bias_H = weights.read_float32(f"{gate}bias", spec.num_heads)[own]
        self._first: tuple[Tensor, Any] | None = None
        """The cache of the first pass and its metadata in this step."""

    def forward(
        self,
        x_TD: Any,
        positions_T: Tensor,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        *,
        is_repeated: bool = False,
    ) -> Tensor:
        """Return the attention output [T, D] of a layer."""
        qkv_THK = self.qkv(x_TD).unflatten(-1, (-1, self._size))
        num_both = self._num_heads + self._num_kv_heads
        qk_THK, v_TGK = qkv_THK.split((num_both, self._num_kv_heads), 1)
        if not is_repeated:
            self._first = kv_cache, attn_metadata
            layer = self._all
        else:
            layer = self._near
            if tables is not None:
                qk_THK, tables = apply_rotary(qk_THK, tables), None
        attended_THK = self._backend.forward_projected(
            qk_THK, v_TGK, None, tables, kv_cache, attn_metadata, layer
        )
        if is_repeated:
            assert self._first is not None
            q_THK = qk_THK[:, : self._num_heads]
            all_THK = self._backend.attend(q_THK.contiguous(), *self._first, self._all)
            logits_TH = (q_THK * self._gate_HK).sum(-1, dtype=torch.float32) + self._gate_bias_H
            gate_TH1 = logits_TH.sigmoid()[..., None]
            attended_THK = torch.lerp(attended_THK.float(), all_THK.float(), gate_TH1).to(
                attended_THK.dtype
            )
        return self._output(attended_THK.flatten(1))
