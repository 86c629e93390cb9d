"""Record biases of attention scores that depend on the distance to the key, and maybe on the query.

Shapes: H heads of this rank, E distances, B buckets of distances.
"""

from __future__ import annotations

import numpy as np
import torch

from ...models.positions.distance_biases import model_buckets, read_distance_biases
from ...models.positions.relative_biases import RelativeBiases
from ..abi import structs
from ..program import Floats
from .blocks import BlockRecorder

LOG2_E = np.float32(np.log2(np.e))
"""log2(e): native softmaxes use base 2."""

_DISTANCE_MARGIN = 128
"""The value of `DistanceBiases::kMargin` in csrc/attention/attention.h."""

_QUERY_MARGIN = 64
"""The value of `QueryBiases::kMargin` in csrc/attention/attention.h."""


def native_relative_biases(
    biases: RelativeBiases, first_column: int, has_sinks: bool, head_bound: float
) -> structs.RelativeBiases:
    """Return the biases that depend on queries.

    The queries' factors begin at `first_column` of the projection. If `has_sinks`, each token's sinks follow them.
    `head_bound` limits the norms of queries and keys.
    """
    profiles_RE, bound = biases.matrix_RE.float().numpy(), biases.bound
    return structs.RelativeBiases(
        first_column,
        *profiles_RE.shape,
        first_column + biases.size if has_sinks else 0,
        0.0 if bound is None else bound.bound,
        head_bound,
        None if bound is None else bound.weight_HK.float().numpy(),
        np.pad(profiles_RE[:, ::-1] * LOG2_E, ((0, 0), (_QUERY_MARGIN, _QUERY_MARGIN))),
    )


def read_biases(blocks: BlockRecorder, max_distance: int, prefix: str = "") -> Floats | None:
    """Return the array for `DistanceBiases` in csrc/attention/attention.h, or None without such biases.

    Args:
        blocks: Has the model's spec, weights and part.
        max_distance: The greatest distance of a key from a query.
        prefix: The prefix of the attention's tensors, if each layer has its own biases.
    """
    spec, heads = blocks.spec, blocks.shard.heads(blocks.spec)
    if not (spec.alibi_slopes or spec.num_distance_buckets):
        return None
    distances_E = torch.arange(2 * max_distance + _DISTANCE_MARGIN) - max_distance
    if spec.alibi_slopes:
        slopes_H1 = torch.tensor(spec.alibi_slopes[heads.start : heads.stop])[:, None]
        if spec.rounds_alibi:
            rounded_HE = slopes_H1.bfloat16() * distances_E.bfloat16()
            biases_HE = rounded_HE.float() * spec.attention_scale
        else:
            # Later keys, which only encoders see, are as far away as earlier ones.
            away_E = distances_E.abs()
            biases_HE = -slopes_H1 * (away_E.sqrt() if spec.has_alibi_roots else away_E)
    else:
        biases_BH = read_distance_biases(spec, blocks.weights, prefix)
        biases_BH = biases_BH[:, heads.start : heads.stop]
        biases_HE = biases_BH.T[:, model_buckets(distances_E, spec)]
    return np.ascontiguousarray(biases_HE.numpy() * LOG2_E)
