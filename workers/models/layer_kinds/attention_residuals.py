"""Layers with attention residuals (Kimi K3, arXiv 2607.24653): blocks attend to sums of earlier outputs.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), R of which are read, E = N * D.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ...attention import DeviceAttention
from ...layers.spec import LayerSpec, ModelSpec
from ...layers.specs.attention_residuals import AttentionResidualsSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..weights import WeightReader
from .hyper_connections import normed


class StreamAttention:
    """A mean of the first `num_read` streams of a token, with the query called `name`."""

    def __init__(
        self, residuals: AttentionResidualsSpec, source: LayerSource, num_read: int
    ) -> None:
        spec = source.spec
        self._query_D = read_stream_query(spec, source.weights, source.prefix.rstrip("."))
        self._eps, self._num_read = residuals.eps, num_read
        self._shape = residuals.num_streams, spec.hidden_size

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D] in the dtype of the streams."""
        x_TRD = x_TE.unflatten(-1, self._shape)[:, : self._num_read].float()
        inverse_TR = torch.rsqrt(x_TRD.square().mean(-1) + self._eps)
        factors_TR = ((x_TRD * self._query_D).sum(-1) * inverse_TR).softmax(-1)
        # Add stream by stream, so that the order of a sum does not depend on the number of tokens.
        parts = [x_TRD[:, i] * factors_TR[:, i, None] for i in range(self._num_read)]
        return sum(parts[1:], parts[0]).to(x_TE.dtype)


def read_stream_query(spec: ModelSpec, weights: WeightReader, name: str) -> Tensor:
    """Return the query called `name`, float32 [D]: the product of a projection and the weights of a norm."""
    size = spec.hidden_size
    projection_D = weights.read_elements(f"{name}_proj.weight", size)
    return projection_D * weights.read_vector(f"{name}_norm.weight", size)


class AttentionResidualLayer(DecoderLayer):
    """A decoder layer whose attention and MLP read means of the streams, and add to one of them."""

    def __init__(
        self,
        residuals: AttentionResidualsSpec,
        layer: LayerSpec,
        source: LayerSource,
        attention: DeviceAttention,
    ) -> None:
        super().__init__(layer, source, attention)
        match = re.search(r"layers\.(\d+)\.", source.prefix)
        assert match is not None, "the prefix names the layer"
        index = int(match[1])
        self._of_attention, self._of_mlp = (
            StreamAttention(residuals, source.at(name), residuals.num_read(index, is_mlp=is_mlp))
            for name, is_mlp in (("attn_res.", False), ("mlp_res.", True))
        )
        first = residuals.stream_of(index) * source.spec.hidden_size
        self._own = slice(first, first + source.spec.hidden_size)
        self._begins = residuals.begins(index)

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the streams `x_TE` in place.

        Nothing is left to be added, so the result is None.
        """
        x_TD = self._of_attention.reduce(x_TE)
        mixed_TD = self._mixed(normed(x_TD, self._attention_input_norm), step)
        if self._begins:
            x_TE[:, self._own] = mixed_TD
        else:
            x_TE[:, self._own] += mixed_TD
        x_TD = self._of_mlp.reduce(x_TE)
        x_TE[:, self._own] += self._feed(normed(x_TD, self._mlp_input_norm), step.own_TP)
