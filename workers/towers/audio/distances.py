"""Numbers for distances between rows that are added to the scores of attention (SEW-D and SpeechT5).

Shapes: P rows, D hidden size, H heads, K head dimension, B buckets of distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....protocol.config.audio.samples import DistanceScores, SamplesSpec
from ...layers.distance_buckets import linear_buckets, log_buckets
from ..weights import Linear, VisionWeights

_TABLE = "audio_tower.embed_positions.pe_k.weight"
_PROJECTED_TABLE = "audio_tower.encoder.rel_embeddings.weight"


def read_distance_table(spec: SamplesSpec, tensors: VisionWeights) -> Tensor:
    """Return the vectors of distances: of the size of heads, or [B, D] if layers project them."""
    found = spec.distances
    assert found is not None
    if not found.projected:
        return tensors.read(_TABLE, 2 * found.span, spec.hidden_size // spec.num_heads)
    table_BD = tensors.read(_PROJECTED_TABLE, 2 * found.span, spec.hidden_size)
    if found.norms_table:
        norm = tensors.read_layer_norm(
            "audio_tower.encoder.LayerNorm", spec.hidden_size, spec.norm_eps
        )
        table_BD = norm(table_BD)
    return table_BD


class LayerDistances:
    """The scores of distances in one layer, which has these projections to queries and keys."""

    def __init__(
        self, spec: SamplesSpec, table: Tensor, to_queries: Linear, to_keys: Linear
    ) -> None:
        assert spec.distances is not None
        self._spec: DistanceScores = spec.distances
        self._num_heads = spec.num_heads
        self._scale = spec.attention_scale or (spec.hidden_size // spec.num_heads) ** -0.5
        self._to_queries, self._to_keys = to_queries, to_keys
        self._keys: Tensor | None = None
        self._queries: Tensor | None = None
        if not self._spec.projected:
            self._keys = table
            return
        if self._spec.compares_queries:
            self._keys = self._split(to_keys(table))
        if self._spec.compares_keys:
            self._queries = self._split(to_queries(table))

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the numbers [H, P, P] of the inputs of the layer."""
        rows_P = torch.arange(len(x_PD), device=x_PD.device)
        buckets_PP = self._buckets(rows_P[:, None] - rows_P)
        scores_HPP = x_PD.new_zeros(self._num_heads, len(x_PD), len(x_PD))
        index_HPP = buckets_PP.expand_as(scores_HPP)
        if self._keys is not None:
            products_HPB = self._split(self._to_queries(x_PD)) @ self._keys.mT
            scores_HPP += products_HPB.gather(2, index_HPP)
        if self._queries is not None:
            products_HPB = self._split(self._to_keys(x_PD)) @ self._queries.mT
            # The rows of these products are keys.
            scores_HPP += products_HPB.gather(2, index_HPP.mT).mT
        return scores_HPP * self._scale

    def _split(self, x_PD: Tensor) -> Tensor:
        """Return the parts [H, P, K] of the heads."""
        return x_PD.unflatten(1, (self._num_heads, -1)).transpose(0, 1)

    def _buckets(self, distances: Tensor) -> Tensor:
        spec = self._spec
        if spec.max_distance:
            return log_buckets(distances, spec.span, spec.max_distance)
        return linear_buckets(distances, spec.span)
