"""Decoder layers with short convolutions of their queries, keys and values, or of their blocks' outputs.

Shapes: T tokens of a step, D hidden size, P size of a layer's own inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import HeadConvolutions, InnerConvolutions
from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ..attention import Attention
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers.head_convolutions import HeadMixing
from ..mixers.inner_convolutions import LayerConvolutions, StepConvolutions


class ConvolvedLayer(DecoderLayer):
    """A decoder layer that convolves what its attention and its MLP compute (Inkling)."""

    _in_step: StepConvolutions

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        assert isinstance(layer.recurrent, InnerConvolutions)
        self._convolutions = LayerConvolutions(layer.recurrent, source)

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """Do as `DecoderLayer.forward`, with the convolutions' states in the last of the caches."""
        self._in_step = self._convolutions.in_step(*step.caches[-1], x_TD.dtype)
        return super().forward(x_TD, block_TD, step)

    def _mixed(self, x: Any, step: LayerStep) -> Tensor:
        assert isinstance(self._attention, Attention)
        attended_TD = self._attention.forward(
            x, step.positions_T, step.tables, *step.caches[0], self._in_step.of_projection
        )
        return self._in_step.of_attention(attended_TD)

    def _feed(self, x_TD: Any, inputs_TP: Tensor | None) -> Tensor:
        return self._in_step.of_mlp(super()._feed(x_TD, inputs_TP))


class MixedHeadsLayer(DecoderLayer):
    """A decoder layer that combines the heads of its attention, and tokens, before it attends (ZAYA1)."""

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        assert isinstance(layer.recurrent, HeadConvolutions)
        self._mixing = HeadMixing(layer.recurrent, source)

    def _mixed(self, x: Any, step: LayerStep) -> Tensor:
        assert isinstance(self._attention, Attention)
        mix = partial(self._mixing.mix, *step.caches[-1])
        return self._attention.forward(x, step.positions_T, step.tables, *step.caches[0], mix)
