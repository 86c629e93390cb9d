"""Layers with attention residuals (Kimi K3, arXiv 2607.24653): blocks attend to sums of earlier outputs.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), R of which are read, E = N * D.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..norms import read_norm
from .convolved import ConvolvedLayer
from .hyper_connections import normed
from .messages import MESSAGES, Messages
from .stream_attention import StreamAttention


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
        # Inputs with the same norm are the same.
        num_queries = max(1, len(set(layer.input_norms)))
        self._of_attention = StreamAttention(
            residuals, source.at("attn_res."), num_read, num_queries
        )
        num_read = residuals.num_read(index, is_mlp=True)
        self._of_mlp = StreamAttention(residuals, source.at("mlp_res."), num_read)
        first = residuals.stream_of(index) * spec.hidden_size
        self._own = slice(first, first + spec.hidden_size)
        self._begins = residuals.begins(index)
        self._messages: Messages | None = None
        if residuals.passes is not None and residuals.looped_index(index) is not None:
            self._messages = Messages(residuals, source, index)

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the streams `x_TE` in place.

        Nothing is left to be added, so the result is None.
        """
        means = self._of_attention.means(x_TE)
        x: Any = normed(means[0], self._attention_input_norm)
        if self._input_norms:
            means = means * (len(self._input_norms) // len(means))
            if self._messages is not None and step.is_repeated:
                means = self._messages.combine(x_TE, means, MESSAGES[:-1])
            x = tuple(norm(each) for norm, each in zip(self._input_norms, means, strict=True))
        mixed_TD = self._mixed(x, step)
        if self._begins:
            x_TE[:, self._own] = mixed_TD
        else:
            x_TE[:, self._own] += mixed_TD
        x_TD = self._of_mlp.reduce(x_TE)
        if self._messages is not None and step.is_repeated:
            (x_TD,) = self._messages.combine(x_TE, [x_TD], MESSAGES[-1:])
        x_TE[:, self._own] += self._feed(normed(x_TD, self._mlp_input_norm), step.own_TP)


class ConvolvedResidualLayer(ConvolvedLayer, AttentionResidualLayer):
    """An attention-residual layer with convolutions of keys, values and the outputs of blocks (Inkling 2)."""

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Do as `AttentionResidualLayer.forward`, with the convolutions' states in the last of the caches."""
        super().forward(x_TE, block_TD, step)
