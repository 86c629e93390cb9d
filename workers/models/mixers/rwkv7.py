"""The time mixing of RWKV-7 (Peng et al., 2025, arXiv 2503.14456): a generalized delta rule.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H heads of this shard, K elements of a
head, I elements of all heads of this shard, R elements of a low-rank projection, F channels of an input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Rwkv7
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..stage.passed_state import PassedState
from ..weights import WeightReader
from .delta_rule import generalized_delta_rule
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache

_LOWEST_LOG_DECAY: Final = -0.6065306597126334
"""The negative of exp(-1/2)."""
_MIXTURES: Final = "rwkvag"
"""The names of the mixtures of two hidden states, in the order of a stored table."""


class FirstValues(PassedState):
    """The values [T, I] of the model's first layer, which later layers interpolate with their own.

    Args:
        own: The elements of this rank's heads among all.
        size: The number of elements of all heads.
    """

    def __init__(self, own: range, size: int) -> None:
        self._own, self._size = own, size
        self.values_TI: Tensor | None = None

    def receive(self, received_TE: Tensor | None) -> None:
        """See `PassedState.receive`."""
        self.values_TI = None
        if received_TE is not None:
            self.values_TI = received_TE[:, self._own.start : self._own.stop]

    def sent(self) -> Tensor | None:
        """See `PassedState.sent`. The elements of other ranks are 0, because only this rank's next stage reads them."""
        assert self.values_TI is not None
        return F.pad(self.values_TI, (self._own.start, self._size - self._own.stop))


class Rwkv7Mixer(Mixer):
    """Linear attention with a generalized delta rule, whose products read mixtures of two tokens' hidden states."""

    first: FirstValues
    """The values of the first layer, which the layers of a stage share. The decoder sets this."""

    def __init__(self, layer: Rwkv7, source: LayerSource) -> None:
        super().__init__(layer, source)
        _, weights, prefix, shard, _ = source
        heads, size = shard.tensor_parallel.part(layer.num_heads), layer.hidden_size
        own = elements(heads, layer.head_dim)
        self._layer, self._num_heads, self._width = layer, len(heads), len(own)
        self._is_first = re.search(r"layers\.0\.", prefix) is not None
        self.first = FirstValues(own, size)
        self._mixtures_D = _read_mixtures(layer, weights, prefix)
        self._query, self._key, self._value = (
            source.read_linear(f"{name}_proj", size, size, own) for name in "rkv"
        )

        def low_rank(name: str, rank: int) -> LowRank:
            # Only gates have no bias.
            return LowRank(source.at(f"{name}_lora.lora."), rank, size, own, has_bias=name != "g")

        self._decay, self._rate = low_rank("w", layer.decay_rank), low_rank("a", layer.rate_rank)
        self._share = None if self._is_first else low_rank("v", layer.value_rank)
        self._gate = low_rank("g", layer.gate_rank) if layer.gate_rank else None
        self._key_factor_I, self._rate_factor_I, self._bonus_I = (
            weights.read_elements(f"{prefix}{name}", size)[own.start : own.stop]
            for name in ("k_k", "k_a", "r_k")
        )
        self._norm: list[Tensor] = []
        if layer.has_norm:
            self._norm = [
                weights.read_vector(f"{prefix}norm.{name}", size, own).unflatten(
                    0, (-1, layer.head_dim)
                )
                for name in ("weight", "bias")
            ]

    @staticmethod
    def rows(
        layer: Rwkv7, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. Each product reads its own input, so there is no joint projection."""
        return MixerRows([], [], layer.num_heads, layer.head_dim)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        dtype, size = x.dtype, self._layer.hidden_size
        of_hidden, of_heads = StateCache(memory, self._size, dtype).split(size)
        x_TD, previous_TD = x.float(), of_hidden.previous(x, batch).float()
        difference_TD = previous_TD - x_TD
        r_TD, w_TD, k_TD, v_TD, a_TD, *g_TD = (
            torch.addcmul(x_TD, difference_TD, mixture_D).to(dtype)
            for mixture_D in self._mixtures_D
        )
        q_TI, k_TI, v_TI = self._query(r_TD), self._key(k_TD), self._value(v_TD)
        log_decay_TI = _LOWEST_LOG_DECAY * self._decay(w_TD, torch.tanh).sigmoid()
        rate_TI = self._rate(a_TD).sigmoid()
        if self._share is None:
            self.first.values_TI = v_TI
        else:
            first_TI, own_TI = self.first.values_TI, v_TI.float()
            assert first_TI is not None
            share_TI = self._share(v_TD).sigmoid()
            v_TI = torch.addcmul(own_TI, first_TI.float() - own_TI, share_TI).to(dtype)
        inputs_TF = torch.cat((q_TI, log_decay_TI.to(dtype), k_TI, v_TI, rate_TI.to(dtype)), -1)
        of_heads, _ = of_heads.split(5 * self._width)
        inputs_NCF = of_heads.all_inputs(inputs_TF, batch)[batch.inputs_of_segments[:, 1:]]
        q, log_decay, k, v, rate = (
            part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for part in inputs_NCF.float().chunk(5, -1)
        )
        removed, k = self._keys(k, rate)
        y_NHCK = generalized_delta_rule(
            q, k, v, -removed, removed * rate, log_decay, of_heads, batch
        )
        y_NCHK, q, k, v = (each.transpose(1, 2) for each in (y_NHCK, q, k, v))
        if self._norm:
            weight_HK, bias_HK = self._norm
            normed = F.layer_norm(y_NCHK, y_NCHK.shape[-1:], None, None, self._layer.norm_eps)
            y_NCHK = torch.addcmul(bias_HK, normed, weight_HK)
        bonus_NCH1 = (q * k * self._bonus_I.view(self._num_heads, -1)).sum(-1, keepdim=True)
        y_NCHK = torch.addcmul(y_NCHK, bonus_NCH1, v)
        y_TI = y_NCHK.flatten(2).flatten(0, 1)[batch.tokens]
        if self._gate is not None:
            y_TI = y_TI * self._gate(g_TD[0], torch.sigmoid)
        return self._output(y_TI.to(dtype))

    def _keys(self, k_NHCK: Tensor, rate_NHCK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys under which values are replaced, and those under which values are added."""
        shape = self._num_heads, 1, self._layer.head_dim
        key_factor_H1K, rate_factor_H1K = (
            each.view(shape) for each in (self._key_factor_I, self._rate_factor_I)
        )
        removed_NHCK = F.normalize(k_NHCK * key_factor_H1K, dim=-1)
        return removed_NHCK, k_NHCK * (1 + (rate_NHCK - 1) * rate_factor_H1K)


class LowRank:
    """A product of two matrices, with an optional bias. The first one has `rank` rows, which every rank has."""

    def __init__(
        self, source: LayerSource, rank: int, size: int, own: range, *, has_bias: bool
    ) -> None:
        self._down = source.read_linear("0", rank, source.spec.hidden_size)
        self._up = source.read_linear("2", size, rank, own)
        self._bias_I: Tensor | None = None
        if has_bias:
            self._bias_I = source.weights.read_vector(f"{source.prefix}2.bias", size, own)

    def __call__(
        self, x_TD: Tensor, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the product in float32, with an activation between the matrices."""
        x_TR = self._down(x_TD)
        y_TI = self._up(x_TR if activation is None else activation(x_TR)).float()
        return y_TI if self._bias_I is None else y_TI + self._bias_I


def _read_mixtures(layer: Rwkv7, weights: WeightReader, prefix: str) -> tuple[Tensor, ...]:
    """Return the share of the previous hidden state in each mixture, float32 [D], stored separately or joined."""
    size, names = layer.hidden_size, _MIXTURES if layer.gate_rank else _MIXTURES[:-1]
    if weights.has(joined := f"{prefix}x_x"):
        return weights.read_elements(joined, len(names) * size).chunk(len(names))
    return tuple(weights.read_elements(f"{prefix}x_{name}", size) for name in names)
