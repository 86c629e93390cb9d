"""A layer of an encoder with a gated convolution of each token's neighbors instead of attention (bidirectional LFM2).

Shapes: T tokens of a step, D hidden size, F channels of this shard.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers.short_convolution import ShortConvolutionMixer
from ..norms import added, read_norm
from ..positions.neighbors import neighbor_rows


class NeighborsLayer(DecoderLayer):
    """A layer whose convolution reads as many tokens before a token as after it, and has no state."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        spec, weights, prefix, shard, kernels = source
        convolution, norms = layer.neighbors, layer.norms or spec.norms
        assert convolution is not None
        self._norm = read_norm(spec, weights, f"{prefix}{norms.attention_input}", kernels)
        inner, parallel = source.at("mixer."), shard.tensor_parallel
        rows = ShortConvolutionMixer.rows(convolution, weights, inner.prefix, parallel)
        has_bias, size = convolution.has_bias, convolution.channels
        self._projection = inner.read_rows(rows.projection, spec.hidden_size, has_biases=has_bias)
        (own,) = rows.convolution
        taps_F1K = weights.read(f"{own.name}.weight", size, 1, convolution.kernel, part=own.part)
        self._taps = taps_F1K.float()[:, 0].unbind(1)
        self._bias_F: Tensor | None = None
        if has_bias:
            self._bias_F = weights.read(f"{own.name}.bias", size, part=own.part).float()
        self._output = inner.read_columns(
            "out_proj", spec.hidden_size, size, own.part, has_bias=has_bias
        )

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """See `DecoderLayer.forward`."""
        x = added(x_TD, block_TD, self._spec, self._norm)
        return super().forward(x_TD, self._convolved(x, step.positions_T), step)

    def _convolved(self, x: Any, positions_T: Tensor) -> Tensor:
        """Return the output of the convolution [T, D], in which texts are surrounded by zeros."""
        input_gate_TF, output_gate_TF, x_TF = self._projection(x).chunk(3, -1)
        gated_TF = (input_gate_TF * x_TF).float()
        first, *others = (
            tap_F * neighbor_rows(gated_TF, positions_T, offset)
            for offset, tap_F in enumerate(self._taps, -(len(self._taps) // 2))
        )
        y_TF = sum(others, first)
        if self._bias_F is not None:
            y_TF = y_TF + self._bias_F
        return self._output(output_gate_TF * y_TF.to(x_TF.dtype))
