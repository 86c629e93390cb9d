"""The gated short convolution of LFM2.

Shapes: T tokens of a step, D hidden size, F channels of this shard.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import ShortConvolution
from ...layers.parallel.tensor_parallel import TensorParallel
from ..weights import Rows, WeightReader
from .mixer import Mixer, MixerRows, segments
from .states import StateBatch, StateCache


class ShortConvolutionMixer(Mixer):
    """A short convolution over the last tokens, with projected gates on its input and on its output."""

    @staticmethod
    def rows(
        layer: ShortConvolution, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to the input gate, the output gate and the input."""
        channels, part = layer.channels, tensor_parallel.part(layer.channels)
        return MixerRows(
            segments(f"{prefix}in_proj", [channels] * 3, [part] * 3),
            [Rows(f"{prefix}conv1d", channels, part)],
            channels,
            has_projection_bias=layer.has_bias,
            has_convolution_bias=layer.has_bias,
            has_output_bias=layer.has_bias,
        )

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        input_gate_TF, output_gate_TF, x_TF = self.projection(x).chunk(3, -1)
        cache = StateCache(memory, self._size, x_TF.dtype)
        inputs_XF = cache.all_inputs(input_gate_TF * x_TF, batch)
        convolved_XF = self._conv(inputs_XF[batch.inputs_of_segments]).flatten(0, 1)
        return self._output(output_gate_TF * convolved_XF[batch.tokens].to(x_TF.dtype))
