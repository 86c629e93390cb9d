"""The rows of attention's first products beside queries, keys, values and gates, separate inputs, and sinks.

Shapes: T tokens of a step, D hidden size, F outputs, H query and G key/value heads, Q queries of one,
N sinks, K elements of a key, V of a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ...protocol.checkpoint.recurrent_layers import InnerConvolutions
from ..layers.layer_spec import LayerSpec
from ..layers.layers import RMSNorm
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import elements
from ..layers.spec import ModelSpec
from .layer_source import LayerSource
from .weights import Rows, WeightReader


def read_sinks(
    spec: ModelSpec, layer: LayerSpec, weights: WeightReader, prefix: str, heads: range
) -> Tensor | None:
    """Return the additional score of each of these heads, or None if the layer has none."""
    if not (spec.has_sinks and layer.has_sinks):
        return None
    return weights.read_vector(f"{prefix}sinks", spec.num_heads, heads)


class Sinks(NamedTuple):
    """The keys of sinks for the queries of a step.

    `scores_TH` are logarithms of the sums of their exponentiated scores, float32. `shares_TGQN` are their parts of
    these sums, and `values_GNV` their values, or None without values.
    """

    scores_TH: Tensor
    shares_TGQN: Tensor
    values_GNV: Tensor | None

    def marked(self, v_TGK: Tensor) -> Tensor:
        """Return values with a 1 after their last element, if sinks have values.

        The attended element is the sum of the weights of all other keys.
        """
        if self.values_GNV is None:
            return v_TGK
        v_TGK = v_TGK.clone()
        v_TGK[..., self.values_GNV.shape[-1]] = 1.0
        return v_TGK

    def complete(self, attended_THK: Tensor) -> Tensor:
        """Return the outputs of heads, to which the weighted values of sinks are added."""
        if self.values_GNV is None:
            return attended_THK
        size = self.values_GNV.shape[-1]
        weight_TH1 = 1 - attended_THK[..., size : size + 1].float()
        # One product for each sink, whose order does not depend on the number of tokens.
        pairs = zip(self.shares_TGQN.unbind(-1), self.values_GNV.unbind(1), strict=True)
        first_TGQV, *others = (x.unsqueeze(-1) * value_GV.unsqueeze(1) for x, value_GV in pairs)
        mean_TGQV = sum(others, first_TGQV)
        added_THV = weight_TH1 * mean_TGQV.flatten(1, 2)
        return (attended_THK[..., :size] + added_THV).to(attended_THK.dtype)


class SinkKeys:
    """The keys of sinks [G, N, K], and their values [G, N, V] or None."""

    def __init__(self, keys_GNK: Tensor, values_GNV: Tensor | None, scale: float) -> None:
        self._keys_GNK, self._values_GNV, self._scale = keys_GNK, values_GNV, scale

    def of_queries(self, q_THK: Tensor) -> Sinks:
        """Return the sinks of queries, after their norm and rotation."""
        q_TGQK = q_THK.float().unflatten(1, (len(self._keys_GNK), -1)) * self._scale
        scores_TGQN = torch.stack(
            [(q_TGQK * key_GK.unsqueeze(1)).sum(-1) for key_GK in self._keys_GNK.unbind(1)], -1
        )
        total_TGQ1 = scores_TGQN.logsumexp(-1, keepdim=True)
        shares_TGQN = (scores_TGQN - total_TGQ1).exp()
        return Sinks(total_TGQ1.flatten(1), shares_TGQN, self._values_GNV)


def read_sink_keys(
    spec: ModelSpec, weights: WeightReader, prefix: str, kv_heads: range, order_K: Tensor
) -> SinkKeys | None:
    """Return the keys of the sinks of these key/value heads; None if sinks have no keys.

    `order_K` has the index in the checkpoint of each element of a key.
    """
    if not spec.num_sink_keys:
        return None

    def read(name: str, size: int) -> Tensor:
        shape = spec.num_sink_keys, spec.num_kv_heads, size
        all_NGX = weights.read_elements(f"{prefix}{name}", math.prod(shape)).view(shape)
        return all_NGX[:, kv_heads.start : kv_heads.stop].transpose(0, 1).contiguous()

    keys_GNK = read("sink_k", spec.head_dim)
    if spec.qk_norm == "only keys":
        weight_K = weights.read_vector(f"{prefix}k_norm.weight", spec.head_dim)
        keys_GNK = torch.rms_norm(keys_GNK, (spec.head_dim,), weight_K, spec.norm_eps)
    values_GNV = read("sink_v", spec.output_dim) if spec.has_sink_values else None
    return SinkKeys(keys_GNK[..., order_K.to(weights.device)], values_GNV, spec.attention_scale)


def sink_rows(spec: ModelSpec, prefix: str, heads: range) -> list[Rows]:
    """Return the rows of the projection to these heads' sinks; none if sinks are not projected."""
    if not spec.projects_sinks:
        return []
    return [Rows(f"{prefix}sink_proj", spec.num_heads, heads, has_bias=False)]


def tap_rows(spec: ModelSpec, layer: LayerSpec, prefix: str, shard: ModelShard) -> list[Rows]:
    """Return the rows of the projections to the taps of keys, then of values; none if taps are only stored."""
    convolutions = layer.recurrent
    if not isinstance(convolutions, InnerConvolutions) or not convolutions.is_dynamic:
        return []
    kernel, heads = convolutions.kernel, shard.kv_heads(spec)
    part, count = elements(heads, kernel), spec.num_kv_heads * kernel
    return [Rows(f"{prefix}{x}_conv_taps", count, part, has_bias=False) for x in "kv"]


def input_of_rows(rows: Rows) -> int:
    """Return the input that rows read, of those for queries, keys and values. Gates read that for queries."""
    module = rows.name.rpartition(".")[2]
    return {"k": 1, "v": 2}.get(module[0], 0) if module[1] == "_" else 0


class SeparateProjections:
    """Products of rows, of which each reads one of several inputs, side by side."""

    def __init__(self, rows: list[Rows], columns: int, source: LayerSource) -> None:
        inputs = [input_of_rows(each) for each in rows]
        by_input = [
            [each for each, own in zip(rows, inputs, strict=True) if own == i]
            for i in range(max(inputs) + 1)
        ]
        self._linears = [source.read_rows(own, columns) for own in by_input]
        self._sizes = [[each.count for each in own] for own in by_input]
        self._inputs = inputs

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the products [T, F] in the order of the rows."""
        parts = [
            iter(linear(x_TD).split(sizes, -1))
            for linear, x_TD, sizes in zip(self._linears, inputs, self._sizes, strict=True)
        ]
        return torch.cat([next(parts[i]) for i in self._inputs], -1)


class LowRankQueries:
    """Products of rows, of which the first ones, for queries, read a normed projection of the input (Step 3)."""

    def __init__(self, rows: list[Rows], source: LayerSource) -> None:
        spec, prefix = source.spec, source.prefix
        self._rank = spec.query_rank
        low = Rows(f"{prefix}q_proj", self._rank, range(self._rank))
        self._first = source.read_rows([low, *rows[1:]], spec.hidden_size)
        self._queries = source.read_rows([replace(rows[0], name=f"{prefix}wq")], self._rank)
        weight = source.weights.read_vector(f"{prefix}inter_norm.weight", self._rank)
        self._norm = RMSNorm(weight, spec.norm_eps)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the products [T, F] in the order of the rows."""
        first_TX = self._first(x_TD)
        low_TX, rest_TX = first_TX.tensor_split((self._rank,), 1)
        return torch.cat((self._queries(self._norm(low_TX)), rest_TX), 1)
