"""Decoder layers whose mixer, and possibly whose MLP, reads mixtures of a token's hidden state and the one before it.

Shapes: T tokens of a step, D hidden size, P size of a layer's own inputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import Rwkv6, Rwkv7
from ....protocol.checkpoint.state_spaces.rwkv4 import Rwkv4
from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ...layers.layers import Linear
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers.rwkv7 import FirstValues, Rwkv7Mixer
from ..mixers.states import StateBatch, StateCache


class TokenShiftLayer(DecoderLayer):
    """A layer of an RWKV. The last inputs of its state are the hidden states that the MLP reads, if it reads two."""

    _state: tuple[Tensor, StateBatch]

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        super().__init__(layer, source, attention)
        assert isinstance(layer.recurrent, Rwkv4 | Rwkv6 | Rwkv7)
        self._size = layer.recurrent.state_parts.size(source.shard.tensor_parallel.size)
        self._hidden_size = source.spec.hidden_size
        self._mixture_D: Tensor | None = None
        if layer.recurrent.shifts_mlp:
            name = f"{source.prefix}mlp.x_k"
            self._mixture_D = source.weights.read_elements(name, self._hidden_size)
        self._factor = 1.0
        self._gate: Linear | None = None
        if isinstance(layer.recurrent, Rwkv6):
            match = re.search(r"layers\.(\d+)\.", source.prefix)
            assert match is not None, "the prefix names the layer"
            if period := layer.recurrent.halving_period:
                self._factor = 2.0 ** (int(match[1]) // period)
        if isinstance(layer.recurrent, Rwkv4 | Rwkv6) and layer.recurrent.shifts_mlp:
            size, mlp = self._hidden_size, source.at("mlp.")
            self._gate = mlp.read_linear("receptance", size, size)
            self._gate_mixture_D = source.weights.read_elements(f"{mlp.prefix}x_r", size)
        if isinstance(layer.recurrent, Rwkv4) and self._mixture_D is not None:
            # The stored shares are those of the token itself.
            self._mixture_D, self._gate_mixture_D = 1 - self._mixture_D, 1 - self._gate_mixture_D

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """Compute the layer as `DecoderLayer.forward` does. The MLP has a state, too."""
        self._state = step.caches[-1]
        return super().forward(x_TD, block_TD, step)

    def _mixed(self, x: Any, step: LayerStep) -> Tensor:
        mixed_TD = super()._mixed(x, step)
        return mixed_TD if self._factor == 1.0 else mixed_TD * self._factor

    def _feed(self, x_TD: Any, inputs_TP: Tensor | None) -> Tensor:
        if self._mixture_D is None:
            return super()._feed(x_TD, inputs_TP)
        memory, batch = self._state
        cache = StateCache(memory, self._size, x_TD.dtype)
        _, of_mlp = cache.split(self._size.channels - self._hidden_size)
        x, previous_TD = x_TD.float(), of_mlp.previous(x_TD, batch).float()
        difference_TD, dtype = previous_TD - x, x_TD.dtype
        mixed_TD = torch.addcmul(x, difference_TD, self._mixture_D).to(dtype)
        y_TD = super()._feed(mixed_TD, inputs_TP)
        if self._gate is None:
            return y_TD
        mixed_TD = torch.addcmul(x, difference_TD, self._gate_mixture_D).to(dtype)
        gate_TD = self._gate(mixed_TD).float().sigmoid() * self._factor
        return (y_TD.float() * gate_TD).to(dtype)


def share_values(layers: Sequence[Any]) -> FirstValues:
    """Return the values of the model's first layer, which these layers of a stage share from now on."""
    mixers = [layer.mixer for layer in layers if isinstance(layer, TokenShiftLayer)]
    rwkv7 = [mixer for mixer in mixers if isinstance(mixer, Rwkv7Mixer)]
    for mixer in rwkv7:
        mixer.first = rwkv7[0].first
    return rwkv7[0].first
