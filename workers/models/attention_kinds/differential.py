"""Differential attention: the difference of what two heads attend to (arXiv 2410.05258).

The heads of a pair share values of twice the size of a key, which is the size of both in the cache.

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, P = G / 2 pairs of
key/value heads, R query heads for each of these, N elements of a query, K = 2 * N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.errors import ConfigError
from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from ..weights import Rows
from .kind import Attend, AttentionKind


class DifferentialAttention(AttentionKind):
    """Attention whose second half of heads is subtracted from the first, times a trained number.

    The differences are normed without weights.

    Raises:
        ConfigError: Ranks would divide a pair of heads.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, _ = source
        assert layer.difference is not None
        self._size, self._eps = spec.head_dim // 2, spec.norm_eps
        kv_heads, num_pairs = shard.kv_heads(spec), spec.num_kv_heads // 2
        if len(kv_heads) % 2:
            raise ConfigError(
                f"--tensor-parallel-size {shard.tensor_parallel.size}: at most {num_pairs} ranks, half of the "
                "key/value heads, can divide differential attention"
            )
        group = spec.num_heads // spec.num_kv_heads
        pairs = torch.arange(kv_heads.start // 2, kv_heads.stop // 2)
        # The heads of a pair are stored apart, and are next to each other here.
        own_G = torch.stack((pairs, pairs + num_pairs), 1).flatten()
        own_H = (own_G[:, None] * group + torch.arange(group)).flatten()
        own = {"q": (own_H, spec.num_heads), "k": (own_G, spec.num_kv_heads)}
        own["v"] = own["k"]
        rows = [
            Rows(
                f"{prefix}{name}_proj",
                count * self._size,
                range(count * self._size),
                (heads[:, None] * self._size + torch.arange(self._size)).flatten(),
            )
            for name, (heads, count) in own.items()
        ]
        self._num_heads, self._num_kv_heads, self._group = len(own_H), len(own_G), group
        has_bias = spec.qkv_bias
        self.qkv = source.read_rows(rows, spec.hidden_size, has_biases=has_bias)
        part = range(kv_heads.start // 2 * group, kv_heads.stop // 2 * group)
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            spec.num_heads * self._size,
            elements(part, spec.head_dim),
            has_bias=has_bias,
        )
        first, second = (
            torch.exp(
                weights.read_vector(f"{prefix}lambda_q{i}", self._size)
                @ weights.read_vector(f"{prefix}lambda_k{i}", self._size)
            )
            for i in (1, 2)
        )
        self._share = first - second + layer.difference
        self._scale = 1 - layer.difference

    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        qkv_THN = self.qkv(x_TD).unflatten(-1, (-1, self._size))
        num_both = self._num_heads + self._num_kv_heads
        qk_THN, v_TGN = qkv_THN.split((num_both, self._num_kv_heads), 1)
        qk_THK = F.pad(qk_THN, (0, self._size))
        v_TPK = v_TGN.unflatten(1, (-1, 2)).flatten(2)
        attended_THK = attend(qk_THK, v_TPK.repeat_interleave(2, 1))
        first_TPRK, second_TPRK = attended_THK.unflatten(1, (-1, 2, self._group)).float().unbind(2)
        difference_TPRK = first_TPRK - self._share * second_TPRK
        normed_TPRK = F.rms_norm(difference_TPRK, (2 * self._size,), None, self._eps)
        return self._output((normed_TPRK * self._scale).flatten(1).to(attended_THK.dtype))
