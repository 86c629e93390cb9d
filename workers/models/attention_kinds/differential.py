"""Differential attention: the difference of what two heads attend to (arXiv 2410.05258).

The heads of a pair share values of twice the size of a key, which is the size of both in the cache.

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, P = G / 2 pairs of
key/value heads, R query heads for each of these, N elements of a query, K = 2 * N.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.errors import ConfigError
from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from .kind import Attend, AttentionKind


class DifferentialAttention(AttentionKind):
    """Attention in which the second head of each pair is subtracted from the first, times a trained number.

    Raises:
        ConfigError: Ranks would divide a pair of heads.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, _ = source
        assert layer.difference is not None
        self._size, self._difference = spec.head_dim // 2, layer.difference
        kv_heads, num_pairs = shard.kv_heads(spec), spec.num_kv_heads // 2
        if len(kv_heads) % 2:
            raise ConfigError(
                f"--tensor-parallel-size {shard.tensor_parallel.size}: at most {num_pairs} ranks, half of the "
                "key/value heads, can divide differential attention"
            )
        group = spec.num_heads // spec.num_kv_heads
        pairs = torch.arange(kv_heads.start // 2, kv_heads.stop // 2)
        # The keys of a pair are next to each other here, and so are the groups of queries that read each of them.
        queries_PR = pairs[:, None] * group + torch.arange(group)
        if layer.difference.are_neighbors:
            own_G = torch.stack((2 * pairs, 2 * pairs + 1), 1).flatten()
            sharing = layer.difference.num_sharing
            first_PR = queries_PR // sharing * (sharing + 1)
            own_H = torch.stack((first_PR + queries_PR % sharing, first_PR + sharing), 1).flatten()
        else:
            own_G = torch.stack((pairs, pairs + num_pairs), 1).flatten()
            own_H = torch.stack((queries_PR, queries_PR + num_pairs * group), 1).flatten()
        num_second = spec.num_heads // 2 // layer.difference.num_sharing
        num_queries = spec.num_heads // 2 + num_second
        query_size, kv_size = (n * self._size for n in (num_queries, spec.num_kv_heads))
        names, sizes, heads = ["q_proj"], [query_size], [own_H]
        if layer.kv_source is None:
            names, sizes = [*names, "k_proj", "v_proj"], [*sizes, kv_size, kv_size]
            heads += [own_G, own_G]
        whole = weights.rows(prefix, names, sizes, [range(size) for size in sizes])
        rows = [
            replace(each, order=(own[:, None] * self._size + torch.arange(self._size)).flatten())
            for each, own in zip(whole, heads, strict=True)
        ]
        self._num_heads, self._group = len(own_H), group
        self._num_kv_heads = len(own_G) if layer.kv_source is None else 0
        self.qkv = source.read_rows(
            rows, spec.hidden_size, has_biases=spec.qkv_bias, is_adapted=True
        )
        part = range(kv_heads.start // 2 * group, kv_heads.stop // 2 * group)
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            spec.num_heads * self._size,
            elements(part, spec.head_dim),
            has_bias=spec.attention_output_bias,
            is_adapted=True,
        )
        self._norm_K: Tensor | None = None
        if layer.difference.has_norm_weights:
            self._norm_K = weights.read_vector(f"{prefix}subln.weight", spec.head_dim)
        first, second = (
            torch.exp(
                weights.read_vector(f"{prefix}lambda_q{i}", self._size)
                @ weights.read_vector(f"{prefix}lambda_k{i}", self._size)
            )
            for i in (1, 2)
        )
        self._share = first - second + layer.difference.share

    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        qkv_THN = self.qkv(x_TD).unflatten(-1, (-1, self._size))
        v_TGN = qkv_THN[:, self._num_heads + self._num_kv_heads :]
        qk_THK = F.pad(qkv_THN[:, : self._num_heads + self._num_kv_heads], (0, self._size))
        v_TPK = v_TGN.unflatten(1, (self._num_kv_heads // 2, 2)).flatten(2)
        attended_THK = attend(qk_THK, v_TPK.repeat_interleave(2, 1))
        first_TPRK, second_TPRK = attended_THK.unflatten(1, (-1, 2, self._group)).float().unbind(2)
        difference_TPRK = first_TPRK - self._share * second_TPRK
        size, eps = (2 * self._size,), self._difference.norm_eps
        normed_TPRK = F.rms_norm(difference_TPRK, size, self._norm_K, eps)
        scaled_TPRK = normed_TPRK * (1 - self._difference.share)
        return self._output(scaled_TPRK.flatten(1).to(attended_THK.dtype))
