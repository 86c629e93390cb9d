"""Attention within windows beside the first token of a text, which all tokens read and which reads all (Longformer).

A step computes one whole text, as that of an encoder of sources, and no cache is used.

Shapes: T tokens of the text, D hidden size, H heads of this shard, K elements of a head.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from .kind import Attend, AttentionKind

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")
_LEAST_QUERIES: Final = 128
"""The least number of queries that are computed at once."""


class FirstTokenAttention(AttentionKind):
    """Attention in both directions (arXiv 2004.05150), with further projections for what the first token reads."""

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, _ = source
        assert isinstance(layer.window, int)
        self._window, self._scale, self._size = layer.window, spec.attention_scale, spec.head_dim
        heads = shard.heads(spec)
        total, part = spec.num_heads * self._size, elements(heads, self._size)
        names = [*_PROJECTIONS, *(f"{name}_global" for name in _PROJECTIONS)]
        rows = weights.rows(prefix, names, [total] * len(names), [part] * len(names))
        self._project = source.read_rows(rows, spec.hidden_size, has_biases=spec.qkv_bias)
        self._output = source.read_columns(
            "o_proj", spec.hidden_size, total, part, has_bias=spec.attention_output_bias
        )

    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        projected = self._project(x_TD).unflatten(-1, (6, -1, self._size)).permute(1, 2, 0, 3)
        q_HTK, k_HTK, v_HTK, first_q_HTK, first_k_HTK, first_v_HTK = projected.unbind(0)
        out_HTK = torch.empty_like(q_HTK)
        count, step = q_HTK.shape[1], max(self._window, _LEAST_QUERIES)
        for start in range(0, count, step):
            queries = positions_T[start : start + step]
            keys = positions_T[max(start - self._window + 1, 1) : start + step + self._window - 1]
            keys = torch.cat((positions_T[:1], keys))
            is_near = (queries[:, None] - keys).abs() < self._window
            out_HTK[:, start : start + step] = F.scaled_dot_product_attention(
                q_HTK[:, start : start + step],
                k_HTK[:, keys],
                v_HTK[:, keys],
                is_near | (keys == 0),
                scale=self._scale,
            )
        out_HTK[:, :1] = F.scaled_dot_product_attention(
            first_q_HTK[:, :1], first_k_HTK, first_v_HTK, scale=self._scale
        )
        return self._output(out_HTK.transpose(0, 1).flatten(1))
