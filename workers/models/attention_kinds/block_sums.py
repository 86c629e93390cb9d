"""Attention within windows, and to sums of the hidden states of blocks of tokens (LongT5, arXiv 2112.07916).

A step computes one whole text, as that of an encoder of sources, and no cache is used.

Shapes: T tokens of the text, D hidden size, H heads of this shard, K elements of a head, S sums, Q queries that are
computed at once, N keys that they read, B buckets of distances.
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
from ..norms import read_norm
from ..positions.distance_biases import model_buckets, read_distance_biases
from .kind import Attend, AttentionKind

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")
_LEAST_QUERIES: Final = 128
"""The least number of queries that are computed at once."""


class BlockSumAttention(AttentionKind):
    """Attention in both directions, whose scores have biases that depend on distances between tokens and blocks.

    The tokens after the last whole block belong to it. A text that is shorter than a block has no sums.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, kernels = source
        assert isinstance(layer.window, int)
        self._spec, self._window, self._block_size = spec, layer.window, spec.summed_block_size
        heads = shard.heads(spec)
        total, part = spec.num_heads * spec.head_dim, elements(heads, spec.head_dim)
        rows = weights.rows(prefix, [*_PROJECTIONS], [total] * 3, [part] * 3)
        self._project = source.read_rows(rows, spec.hidden_size)
        self._output = source.read_columns("o_proj", spec.hidden_size, total, part)
        self._norm = read_norm(spec, weights, f"{prefix}sum_norm", kernels)
        own = slice(heads.start, heads.stop)
        self._biases_HB = read_distance_biases(spec, weights, prefix).T[own]
        shape = spec.num_distance_buckets, spec.num_heads
        self._block_biases_HB = weights.read_float32("block_distance_biases.weight", *shape).T[own]

    def _compute(self, x_TD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        count, num_sums = len(x_TD), len(x_TD) // self._block_size
        blocks_T = (positions_T // self._block_size).clamp(max=max(num_sums - 1, 0))
        sums_SD = x_TD.new_zeros(max(num_sums, 1), x_TD.shape[1]).index_add_(0, blocks_T, x_TD)
        all_xD = torch.cat((x_TD, self._norm(sums_SD[:num_sums])))
        projected = self._project(all_xD).unflatten(-1, (3, -1, self._spec.head_dim))
        q_HxK, k_HxK, v_HxK = projected.permute(1, 2, 0, 3).unbind(0)
        out_HTK = torch.empty_like(q_HxK[:, :count])
        sums_S = torch.arange(num_sums, device=positions_T.device)
        step = max(self._window, _LEAST_QUERIES)
        for start in range(0, count, step):
            queries_Q = positions_T[start : start + step]
            keys_N = positions_T[max(start - self._window + 1, 0) : start + step + self._window - 1]
            distances_QN = keys_N - queries_Q[:, None]
            biases_HQN = self._biases_HB[:, model_buckets(distances_QN, self._spec)]
            biases_HQN = biases_HQN.masked_fill(distances_QN.abs() >= self._window, -torch.inf)
            distances_QS = sums_S - blocks_T[start : start + step, None]
            biases_HQS = self._block_biases_HB[:, model_buckets(distances_QS, self._spec)]
            read = torch.cat((keys_N, count + sums_S))
            out_HTK[:, start : start + step] = F.scaled_dot_product_attention(
                q_HxK[:, start : min(start + step, count)],
                k_HxK[:, read],
                v_HxK[:, read],
                torch.cat((biases_HQN, biases_HQS), -1).to(q_HxK.dtype),
                scale=self._spec.attention_scale,
            )
        return self._output(out_HTK.transpose(0, 1).flatten(1))
