"""Layers with attention residuals (Kimi K3, arXiv 2607.24653): blocks attend to sums of earlier outputs.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), R of which are read, E = N * D.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ...layers.spec import ModelSpec
from ...layers.specs.attention_residuals import AttentionResidualsSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..norms import read_norm
from ..weights import WeightReader
from .convolved import ConvolvedLayer
from .hyper_connections import normed


class StreamAttention:
    """Means of the first `num_read` streams of a token, with the queries called `name`."""

    def __init__(
        self, residuals: AttentionResidualsSpec, source: LayerSource, num_read: int, count: int = 1
    ) -> None:
        spec, name = source.spec, source.prefix.rstrip(".")
        self._queries: Sequence[Tensor] = ()
        if num_read > 1:
            self._queries = read_stream_queries(spec, residuals, source.weights, name, count)
        self._norms_values = residuals.norms_values
        self._eps, self._num_read, self._count = residuals.eps, num_read, count
        self._shape = residuals.num_streams, spec.hidden_size

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D] with the first query, in the dtype of the streams."""
        return self.means(x_TE)[0]

    def means(self, x_TE: Tensor) -> list[Tensor]:
        """Return the means [T, D] with all queries, in the dtype of the streams."""
        streams_TRD = x_TE.unflatten(-1, self._shape)[:, : self._num_read]
        if not self._queries:
            return [streams_TRD[:, 0].contiguous()] * self._count
        x_TRD = streams_TRD.float()
        inverse_TR = torch.rsqrt(x_TRD.square().mean(-1) + self._eps)
        means = []
        for query_D in self._queries:
            factors_TR = ((x_TRD * query_D).sum(-1) * inverse_TR).softmax(-1)
            if self._norms_values:
                factors_TR = factors_TR * inverse_TR
            # Add stream by stream, so that the order of a sum does not depend on the number of tokens.
            parts = [x_TRD[:, i] * factors_TR[:, i, None] for i in range(self._num_read)]
            means.append(sum(parts[1:], parts[0]).to(x_TE.dtype))
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


class AttentionResidualLayer(DecoderLayer):
    """A decoder layer whose attention and MLP read means of the streams, and add to one of them."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        spec, residuals = source.spec, source.spec.attention_residuals
        match = re.search(r"layers\.(\d+)\.", source.prefix)
        assert residuals is not None and match is not None, "the prefix names the layer"
        index = int(match[1])
        self._input_norms = [
            read_norm(spec, source.weights, f"{source.prefix}{name}", source.kernels)
            for name in layer.input_norms
        ]
        num_read = residuals.num_read(index, is_mlp=False)
        num_queries = max(1, len(layer.input_norms))
        self._of_attention = StreamAttention(
            residuals, source.at("attn_res."), num_read, num_queries
        )
        num_read = residuals.num_read(index, is_mlp=True)
        self._of_mlp = StreamAttention(residuals, source.at("mlp_res."), num_read)
        first = residuals.stream_of(index) * spec.hidden_size
        self._own = slice(first, first + spec.hidden_size)
        self._begins = residuals.begins(index)

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the streams `x_TE` in place.

        Nothing is left to be added, so the result is None.
        """
        means = self._of_attention.means(x_TE)
        x: Any = normed(means[0], self._attention_input_norm)
        if self._input_norms:
            x = tuple(norm(each) for norm, each in zip(self._input_norms, means, strict=True))
        mixed_TD = self._mixed(x, step)
        if self._begins:
            x_TE[:, self._own] = mixed_TD
        else:
            x_TE[:, self._own] += mixed_TD
        x_TD = self._of_mlp.reduce(x_TE)
        x_TE[:, self._own] += self._feed(normed(x_TD, self._mlp_input_norm), step.own_TP)


class ConvolvedResidualLayer(ConvolvedLayer, AttentionResidualLayer):
    """Such a layer with convolutions of keys, values and the outputs of blocks (Inkling 2)."""

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Do as `AttentionResidualLayer.forward`, with the convolutions' states in the last of the caches."""
        super().forward(x_TE, block_TD, step)
