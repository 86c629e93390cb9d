"""The time mixing of RWKV-4 (Peng et al., 2023, arXiv 2305.13048), computed token by token.

Shapes: T tokens of a step, D hidden size, I channels of this shard, S requests, R requests of a round.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ....protocol.checkpoint.state_spaces.rwkv4 import Rwkv4
from ...layers.parallel.tensor_parallel import TensorParallel
from ..layer_source import LayerSource
from ..weights import WeightReader
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache

_NO_SCALE: Final = -1e38
"""The logarithm of the scale of a state to which no token has been added."""


class Rwkv4Mixer(Mixer):
    """Means of values, whose weights are exponentials of keys that decay with each token."""

    def __init__(self, layer: Rwkv4, source: LayerSource) -> None:
        super().__init__(layer, source)
        weights, prefix, size = source.weights, source.prefix, layer.hidden_size
        own = source.shard.tensor_parallel.part(layer.num_channels)
        self._hidden_size = size
        self._products = [
            (
                source.read_linear(name, layer.num_channels, size, own),
                weights.read_elements(f"{prefix}time_mix_{name}", size),
            )
            for name in ("key", "value", "receptance")
        ]
        decay_I, self._bonus_I = (
            weights.read_elements(f"{prefix}time_{name}", layer.num_channels)[own.start : own.stop]
            for name in ("decay", "first")
        )
        self._log_decay_I = -decay_I.exp()

    @staticmethod
    def rows(
        layer: Rwkv4, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. Each product reads its own input, so there is no joint projection."""
        return MixerRows([], [], layer.num_channels)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        cache, dtype = StateCache(memory, self._size, x.dtype), x.dtype
        of_mixer, _ = cache.split(self._hidden_size)
        x_TD, previous_TD = x.float(), of_mixer.previous(x, batch).float()
        k_TI, v_TI, gate_TI = (
            multiply(torch.lerp(previous_TD, x_TD, share_D).to(dtype)).float()
            for multiply, share_D in self._products
        )
        y_TI = self._scan(k_TI, v_TI, cache, batch)
        return self._output((y_TI * gate_TI.sigmoid()).to(dtype))

    def _scan(self, k_TI: Tensor, v_TI: Tensor, cache: StateCache, batch: StateBatch) -> Tensor:
        """Update the states, and return the outputs of all tokens, float32."""
        states_S3I, y_TI = cache.load(batch).unflatten(1, (3, -1)), torch.empty_like(v_TI)
        states_S3I[:, 2].masked_fill_(batch.is_new[:, None], _NO_SCALE)
        # A segment is one token, and the tokens of a request follow each other.
        for part in batch.rounds:
            tokens, requests = part.segments, part.requests
            state_R3I, v_RI, k_RI = states_S3I[requests], v_TI[tokens], k_TI[tokens]
            sum_R3I = _added(state_R3I, v_RI, k_RI + self._bonus_I)
            y_TI[tokens] = sum_R3I[:, 0] / sum_R3I[:, 1]
            state_R3I[:, 2] += self._log_decay_I
            states_S3I[requests] = _added(state_R3I, v_RI, k_RI)
        cache.store(states_S3I.flatten(1), batch)
        return y_TI


def _added(state_R3I: Tensor, v_RI: Tensor, k_RI: Tensor) -> Tensor:
    """Return the states after values are added with these logarithms of their weights."""
    value_RI, weight_RI, log_RI = state_R3I.unbind(1)
    largest_RI = torch.maximum(log_RI, k_RI)
    old_RI, new_RI = (log_RI - largest_RI).exp(), (k_RI - largest_RI).exp()
    sums = (old_RI * value_RI + new_RI * v_RI, old_RI * weight_RI + new_RI, largest_RI)
    return torch.stack(sums, 1)
