"""Attention that adds a number to the scores of each key, which depends on the key's value (Doge, arXiv 2504.05565).

The number is one more element of the key in the cache, and the query has a constant there.

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, K stored elements of a
head, of which N are those of queries, keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.layers import HeadNorm
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from .kind import Attend, AttentionKind


class KeyBiasAttention(AttentionKind):
    """Attention with norms of queries and keys, and a bias for each key: exp(a * softplus(projection of its values)).

    The projection reads the values of all heads.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, _ = source
        self._size, self._num_added = spec.output_dim, spec.head_dim - spec.output_dim
        heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        # If several ranks share the same heads, these are read only once.
        self._step = max(1, shard.tensor_parallel.size // spec.num_kv_heads)
        counts, parts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), (heads, kv_heads)
        rows = weights.rows(
            prefix,
            ["q_proj", "k_proj", "v_proj"],
            [count * self._size for count in counts],
            [elements(part, self._size) for part in (*parts, kv_heads)],
        )
        has_bias = spec.qkv_bias
        self.qkv = source.read_rows(rows, spec.hidden_size, has_biases=has_bias)
        output = spec.num_heads * self._size
        self._output = source.read_columns(
            "o_proj", spec.hidden_size, output, elements(heads, self._size), has_bias=has_bias
        )
        norms = [
            weights.read_vector(f"{prefix}{x}_norm.weight", self._size).expand(len(part), -1)
            for x, part in zip("qk", parts, strict=True)
        ]
        self._norm = HeadNorm(torch.cat(norms), spec.norm_eps)
        total = spec.num_kv_heads * self._size
        self._to_biases = source.read_linear(
            "dt_proj", spec.num_kv_heads, total, kv_heads, has_bias=has_bias
        )
        self._rate_G = weights.read_vector(f"{prefix}A", spec.num_kv_heads, kv_heads)

    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        qkv_THN = self.qkv(x_TD).unflatten(-1, (-1, self._size))
        num_both = self._num_heads + self._num_kv_heads
        qk_THN, v_TGN = qkv_THN.split((num_both, self._num_kv_heads), 1)
        all_TGN = torch.cat(tuple(self._tensor_parallel.stack(v_TGN)[:: self._step]), 1)
        steps_TG = F.softplus(self._to_biases(all_TGN.flatten(1)).float())
        biases_TG = torch.exp(self._rate_G * steps_TG) / self._layer.scale
        padding = (0, self._num_added)
        qk_THK, v_TGK = F.pad(self._norm(qk_THN), padding), F.pad(v_TGN, padding)
        qk_THK[:, : self._num_heads, self._size] = 1.0
        qk_THK[:, self._num_heads :, self._size] = biases_TG.to(qk_THK.dtype)
        attended_THK = attend(qk_THK, v_TGK)
        return self._output(attended_THK[..., : self._size].flatten(1))
