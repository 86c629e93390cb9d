"""A layer of an encoder to whose output a convolution of its input is added (DeBERTa v2).

Shapes: T tokens of a step, D hidden size, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..norms import read_norm
from ..positions.neighbors import neighbor_rows
from .normed_stream import NormedStreamLayer

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


class InputConvolutionLayer(NormedStreamLayer):
    """A layer that norms its output a last time, after it has added the activated convolution of its input."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        convolution = layer.input_convolution
        assert convolution is not None
        size, name = source.spec.hidden_size, f"{source.prefix}input_convolution"
        weights = source.weights
        weight_DDW = weights.read(f"{name}.weight", size, size, convolution.num_taps)
        self._bias_D = weights.read(f"{name}.bias", size)
        self._taps = [source.kernels.linear(tap.contiguous(), None) for tap in weight_DDW.unbind(2)]
        self._activate = _ACTIVATIONS[convolution.activation]
        norm = f"{source.prefix}convolution_norm"
        self._convolution_norm = read_norm(source.spec, weights, norm, source.kernels)

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """See `NormedStreamLayer.forward`."""
        convolved_TD = self._convolve(x_TD, step.positions_T)
        super().forward(x_TD, block_TD, step)
        self._add_and_norm(x_TD, self._activate(convolved_TD), self._convolution_norm)

    def _convolve(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Return the convolution, in which prompts are surrounded by zeros."""
        sum_TD = self._bias_D.expand(len(x_TD), -1)
        for offset, tap in enumerate(self._taps, -(len(self._taps) // 2)):
            sum_TD = sum_TD + tap(neighbor_rows(x_TD, positions_T, offset))
        return sum_TD
