"""Means of several hidden states of a token, called streams, by attention with stored queries.

Shapes: T tokens of a step, D hidden size, N streams, R of which are read, E = N * D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers.spec import ModelSpec
from ...layers.specs.attention_residuals import AttentionResidualsSpec
from ..layer_source import LayerSource
from ..weights import WeightReader


class StreamAttention:
    """Means of the first `num_read` streams of a token, with the queries called `name`."""

    def __init__(
        self, residuals: AttentionResidualsSpec, source: LayerSource, num_read: int, count: int = 1
    ) -> None:
        spec, name = source.spec, source.prefix.rstrip(".")
        self._queries: Sequence[Tensor] = ()
        if num_read > 1:
            self._queries = read_stream_queries(spec, residuals, source.weights, name, count)
        self._residuals, self._num_read, self._count = residuals, num_read, count
        self._shape = residuals.num_streams, spec.hidden_size

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D] with the first query, in the dtype of the streams."""
        return self.means(x_TE)[0]

    def means(self, x_TE: Tensor) -> list[Tensor]:
        """Return the means [T, D] with all queries, in the dtype of the streams."""
        streams_TRD = x_TE.unflatten(-1, self._shape)[:, : self._num_read]
        if not self._queries:
            return [streams_TRD[:, 0].contiguous()] * self._count
        return stream_means(self._residuals, streams_TRD, self._queries)


def stream_means(
    residuals: AttentionResidualsSpec, streams_TRD: Tensor, queries: Sequence[Tensor]
) -> list[Tensor]:
    """Return the means [T, D] of some streams with all queries, in the dtype of the streams."""
    x_TRD = streams_TRD.float()
    inverse_TR = torch.rsqrt(x_TRD.square().mean(-1) + residuals.eps)
    means = []
    for query_D in queries:
        factors_TR = ((x_TRD * query_D).sum(-1) * inverse_TR).softmax(-1)
        if residuals.norms_values:
            factors_TR = factors_TR * inverse_TR
        # Add stream by stream, so that the order of a sum does not depend on the number of tokens.
        parts = [x_TRD[:, i] * factors_TR[:, i, None] for i in range(x_TRD.shape[1])]
        means.append(sum(parts[1:], parts[0]).to(streams_TRD.dtype))
    return means


def read_stream_queries(
    spec: ModelSpec,
    residuals: AttentionResidualsSpec,
    weights: WeightReader,
    name: str,
    count: int = 1,
) -> Sequence[Tensor]:
    """Return the queries called `name`, float32 [D] each. GGUF files have products of projections and norms."""
    size = spec.hidden_size
    if residuals.norms_values:
        stored_X = weights.read_elements(f"{name}_query", count * size)
        return (stored_X * size**-0.5).view(count, size).unbind()
    if weights.has(product := f"{name}_query.weight"):
        return [weights.read_vector(product, size)]
    projection_D = weights.read_elements(f"{name}_proj.weight", size)
    return [projection_D * weights.read_vector(f"{name}_norm.weight", size)]
