"""Decoder layers that convolve the inputs and the outputs of attention and MLP over the tokens of a block (DFlash 2).

The coefficients are sums of stored ones for each channel and computed ones for each group of channels.

Shapes: T tokens of a step, D hidden size, K taps, G groups of channels, S elements of a group.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...attention import DeviceAttention
from ...layers.layer_spec import BlockConvolution, LayerSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep


class BlockConvolvedLayer(DecoderLayer):
    """A decoder layer of a head that reads blocks, each of which is a chunk of the step."""

    _places_T1: Tensor

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        assert layer.block_convolution is not None
        self._of_attention, self._of_mlp = (
            _Convolutions(layer.block_convolution, source.at(name))
            for name in ("attention_conv.", "mlp_conv.")
        )

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """Do as `DecoderLayer.forward`, with the places of the tokens in their blocks."""
        assert step.places_T1 is not None
        self._places_T1 = step.places_T1
        return super().forward(x_TD, block_TD, step)

    def _mixed(self, x: Any, step: LayerStep) -> Tensor:
        x_TD, after = self._of_attention.begin(x, self._places_T1)
        return self._of_attention.apply(super()._mixed(x_TD, step), after, 1, self._places_T1)

    def _feed(self, x_TD: Any, inputs_TP: Tensor | None) -> Tensor:
        x_TD, after = self._of_mlp.begin(x_TD, self._places_T1)
        return self._of_mlp.apply(super()._feed(x_TD, inputs_TP), after, 1, self._places_T1)


class _Convolutions:
    """The convolutions before and after attention or an MLP, whose coefficients follow from the input of the first."""

    def __init__(self, convolution: BlockConvolution, source: LayerSource) -> None:
        size = source.spec.hidden_size
        self._num_taps, self._group_size = convolution.num_taps, convolution.group_size
        self._num_groups = size // self._group_size
        self._base_2KD = source.weights.read(f"{source.prefix}base_kernel", 2, self._num_taps, size)
        rows = 2 * self._num_taps * self._num_groups
        self._projection = source.read_linear("kernel_projection", rows, size)

    def begin(self, x_TD: Tensor, places_T1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved input, and the coefficients [T, K, G] of the convolution of the output."""
        computed = self._projection(x_TD).view(-1, 2, self._num_taps, self._num_groups)
        return self.apply(x_TD, computed[:, 0], 0, places_T1), computed[:, 1]

    def apply(self, x_TD: Tensor, computed_TKG: Tensor, side: int, places_T1: Tensor) -> Tensor:
        """Return convolved rows. Taps do not reach beyond the first token of a block."""
        x_TGS = x_TD.unflatten(1, (self._num_groups, self._group_size)).float()
        base_KGS = self._base_2KD[side].unflatten(1, (self._num_groups, self._group_size))
        weights_TKGS = base_KGS + computed_TKG[..., None].float()
        y_TGS = weights_TKGS[:, 0] * x_TGS
        for tap in range(1, min(self._num_taps, len(x_TD))):
            shifted_TGS = F.pad(x_TGS[:-tap], (0, 0, 0, 0, tap, 0))
            y_TGS += weights_TKGS[:, tap] * shifted_TGS * (places_T1[..., None] >= tap)
        return y_TGS.flatten(1).to(x_TD.dtype)
