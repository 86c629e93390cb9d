"""The keys and queries of distances in disentangled attention; see `DisentangledSpec`.

Shapes: H query heads of this shard, K head dimension, B buckets, E distances, D hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ....protocol.errors import ConfigError
from ...attention.distance_scores import DistanceScores
from ...layers.distance_buckets import linear_buckets, log_buckets
from ...layers.parallel.tensor_parallel import elements
from ...layers.specs.disentangled import DisentangledSpec
from ..layer_source import LayerSource
from ..norms import read_norm
from ..weights import Rows

_EMBEDDINGS: Final = "distance_embeddings.weight"
_KEYS: Final = "distance_key_proj"
_QUERIES: Final = "distance_query_proj"


def read_distance_scores(source: LayerSource, rows: list[Rows]) -> DistanceScores | None:
    """Return the scores of distances in the attention of `source`; None if the model has none.

    `rows` are those of the projections to this shard's queries and keys.

    Raises:
        ConfigError: Adapters would change the projections, but not what they give for distances.
    """
    spec, weights = source.spec, source.weights
    found = spec.disentangled
    if found is None:
        return None
    if found.shares_projections and weights.loras is not None:
        raise ConfigError(
            "--enable-lora: with share_att_key, adapters of queries and keys would also change the scores of distances, "
            "which are computed once; remove the flag, and merge the adapter into the model"
        )
    embeddings_BD = weights.read(_EMBEDDINGS, 2 * found.span, spec.hidden_size)
    if found.norms_embeddings:
        embeddings_BD = read_norm(spec, weights, "distance_norm", source.kernels)(embeddings_BD)

    own = source.shard.heads(spec)

    def project(each: Rows, name: str) -> Tensor:
        if not found.shares_projections:
            has_bias = name == _QUERIES or spec.key_bias
            size = spec.num_heads * spec.head_dim
            part = elements(own, spec.head_dim)
            each = Rows(f"{source.prefix}{name}", size, part, has_bias=has_bias)
        projection = source.read_rows([each], spec.hidden_size, has_biases=True)
        projected_BHK = projection(embeddings_BD).unflatten(1, (-1, spec.head_dim))
        return (projected_BHK * spec.attention_scale).permute(1, 2, 0).contiguous()

    query_rows, key_rows = rows[:2]
    furthest = found.max_distance
    distances_E = torch.arange(-furthest, furthest + 1, device=embeddings_BD.device)
    return DistanceScores(
        keys_HKB=project(key_rows, _KEYS) if found.compares_queries else None,
        queries_HKB=project(query_rows, _QUERIES) if found.compares_keys else None,
        buckets_E=distance_buckets(distances_E, found),
    )


def distance_buckets(distances: Tensor, spec: DisentangledSpec) -> Tensor:
    """Return the bucket of each distance, the position of the token minus that of the key."""
    if spec.has_log_buckets:
        return log_buckets(distances, spec.span, spec.max_distance)
    return linear_buckets(distances, spec.span)
