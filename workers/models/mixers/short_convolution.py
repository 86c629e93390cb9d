"""The gated short convolution of LFM2.

Shapes: T tokens of a step, D hidden size, F channels of this shard.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import ShortConvolution
from ...layers.parallel.parallel_layers import RowParallelLinear
from ...layers.parallel.tensor_parallel import TensorParallel
from ..layer_source import LayerSource
from ..weights import Rows
from .mixer import CausalConvolution, Mixer, read_parts, segments
from .states import StateBatch, StateCache


class ShortConvolutionMixer(Mixer):
    """A short convolution over the last tokens, with projected gates on its input and on its output."""

    def __init__(self, layer: ShortConvolution, source: LayerSource) -> None:
        spec, weights, prefix, shard, kernels = source
        hidden, channels = spec.hidden_size, layer.channels
        part = shard.tensor_parallel.part(channels)
        rows = projection_rows(layer, prefix, shard.tensor_parallel)
        self.projection = kernels.linear(
            weights.read_matrix_rows(rows, hidden),
            weights.read_biases(rows) if layer.has_bias else None,
        )
        self._conv = CausalConvolution(
            read_parts(weights, f"{prefix}conv1d.weight", (channels, 1, layer.kernel), [part]),
            read_parts(weights, f"{prefix}conv1d.bias", (channels,), [part])
            if layer.has_bias
            else None,
        )
        self._output = RowParallelLinear(
            weights.read_matrix(f"{prefix}out_proj.weight", hidden, channels, part=part, dim=1),
            weights.read(f"{prefix}out_proj.bias", hidden) if layer.has_bias else None,
            shard.tensor_parallel,
            kernels,
        )
        self._size = layer.state_size(shard.tensor_parallel.size)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        input_gate_TF, output_gate_TF, x_TF = self.projection(x).chunk(3, -1)
        cache = StateCache(memory, self._size, x_TF.dtype)
        inputs_XF = cache.all_inputs(input_gate_TF * x_TF, batch)
        convolved_XF = self._conv(inputs_XF[batch.inputs_of_segments]).flatten(0, 1)
        return self._output(output_gate_TF * convolved_XF[batch.tokens].to(x_TF.dtype))


def projection_rows(
    layer: ShortConvolution, prefix: str, tensor_parallel: TensorParallel
) -> list[Rows]:
    """Return this rank's rows of the projections to the input gate, the output gate and the input."""
    part = tensor_parallel.part(layer.channels)
    return segments(f"{prefix}in_proj", [layer.channels] * 3, [part] * 3)
