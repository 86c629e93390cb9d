"""The rows of attention's first products beside queries, keys, values and gates, separate inputs, and sinks.

Shapes: T tokens of a step, D hidden size, F outputs, H query and G key/value heads, Q queries of one, K head size.
"""

from __future__ import annotations

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


class SinkKeys:
    """The keys of sinks, which have no values: one [G, K] for each key/value head."""

    def __init__(self, keys_GK: Tensor, scale: float) -> None:
        self._keys_GK, self._scale = keys_GK, scale

    def scores(self, q_THK: Tensor) -> Tensor:
        """Return the scores of queries, after their norm and rotation, float32 [T, H]."""
        q_TGQK = q_THK.float().unflatten(1, (len(self._keys_GK), -1))
        return (q_TGQK * self._keys_GK.unsqueeze(1)).sum(-1).flatten(1) * self._scale


def read_sink_keys(
    spec: ModelSpec, weights: WeightReader, prefix: str, kv_heads: range
) -> SinkKeys | None:
    """Return the keys of the sinks of these key/value heads; None if sinks have no keys."""
    if not spec.has_sink_keys:
        return None
    keys_E = weights.read_elements(f"{prefix}sink_k", spec.num_kv_heads * spec.head_dim)
    keys_GK = keys_E.view(spec.num_kv_heads, -1)[kv_heads.start : kv_heads.stop]
    return SinkKeys(keys_GK, spec.attention_scale)


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
