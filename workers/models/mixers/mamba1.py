"""Mamba (Gu and Dao, 2023, arXiv 2312.00752), computed token by token.

Shapes: T tokens of a step, D hidden size, H heads and I channels of this shard, W channels of a head, K elements of a
channel's state, E rank of the time steps, S requests, R requests of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Mamba1
from ...layers.layers import RMSNorm
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .mixer import BlockLinear, Mixer, MixerRows, segments
from .states import StateBatch, StateCache


class Mamba1Mixer(Mixer):
    """A state-space layer in which each element of a state has its own decay per token.

    If `keeps_outputs`, `outputs_TI` are the outputs of the current step before their gate.
    """

    keeps_outputs = False
    outputs_TI: Tensor | None = None

    def __init__(self, layer: Mamba1, source: LayerSource) -> None:
        super().__init__(layer, source)
        _, weights, prefix, shard, _ = source
        tensor_parallel = shard.tensor_parallel
        own = own_channels(layer, tensor_parallel)
        self._num_heads = max(1, layer.num_heads // tensor_parallel.size)
        self._sizes = [layer.step_rank, layer.state_size_per_channel, layer.state_size_per_channel]
        self._is_step_last = layer.head_dim > 0
        self._selection: Callable[[Tensor], Tensor]
        self._steps: Callable[[Tensor], Tensor]
        if layer.num_heads == 1:
            self._read_products(layer, source, own)
        else:
            self._read_head_products(layer, source, own)
        self._norms = [
            _norm(layer, weights, f"{prefix}{name}_layernorm.weight", size)
            for name, size in zip(("dt", "b", "c"), self._sizes, strict=True)
        ]
        self._step_bias_I, self._skip_I = (
            read_channels(layer, weights, f"{prefix}{name}", own) for name in ("dt_proj.bias", "D")
        )
        self._a_IK = read_decay(layer, weights, prefix, own)

    @staticmethod
    def rows(
        layer: Mamba1, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to the inputs and to their gates."""
        channels, own = layer.channels, own_channels(layer, tensor_parallel)
        name = f"{prefix}in_proj"
        if layer.head_dim:
            both = range(2 * own.start, 2 * own.stop)
            index = torch.arange(2 * len(own)).view(-1, 2, layer.head_dim)
            projection = [Rows(name, 2 * channels, both, index[:, i].flatten()) for i in (1, 0)]
        elif layer.num_heads > 1:
            both, index = range(2 * own.start, 2 * own.stop), torch.arange(2 * len(own))
            projection = [Rows(name, 2 * channels, both, index[start::2]) for start in (0, 1)]
        else:
            projection = segments(name, [channels] * 2, [own] * 2)
        return MixerRows(
            projection,
            [Rows(f"{prefix}conv1d", channels, own)],
            layer.num_units,
            channels // layer.num_units,
            has_projection_bias=layer.has_bias,
            has_convolution_bias=layer.conv_bias,
            has_output_bias=layer.has_bias,
        )

    def _read_products(self, layer: Mamba1, source: LayerSource, own: range) -> None:
        prefix = source.prefix
        selection = source.read_columns(
            "x_proj", sum(self._sizes), layer.channels, own, is_adapted=True
        )
        rows = step_rows(layer, f"{prefix}dt_proj", own)
        steps = source.read_rows([rows], layer.step_rank, is_adapted=True)
        self._selection = lambda x_TI: selection(x_TI).unsqueeze(1)
        self._steps = lambda steps_T1E: steps(steps_T1E.squeeze(1).contiguous())

    def _read_head_products(self, layer: Mamba1, source: LayerSource, own: range) -> None:
        _, weights, prefix, _, kernels = source
        size = layer.channels // layer.num_heads
        heads = range(own.start // size, own.stop // size)
        selection_HXW, steps_HWE = (
            weights.read(f"{prefix}{name}.weight", layer.num_heads, *shape, part=heads)
            for name, shape in (
                ("x_proj", (sum(self._sizes), size)),
                ("dt_proj", (size, layer.step_rank)),
            )
        )
        selection = BlockLinear(selection_HXW, None, weights.dtype, kernels)
        steps = BlockLinear(steps_HWE, None, weights.dtype, kernels)
        self._selection = lambda x_TI: selection(x_TI.unflatten(1, (len(heads), -1)))
        self._steps = lambda steps_THE: steps(steps_THE).flatten(1)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        inputs_TI, gate_TI = self.projection(x).chunk(2, -1)
        dtype = inputs_TI.dtype
        cache = StateCache(memory, self._size, dtype)
        inputs_TXI = cache.all_inputs(inputs_TI, batch)[batch.inputs_of_segments]
        x_TI = F.silu(self._conv(inputs_TXI)).flatten(0, 1)[batch.tokens].to(dtype)
        steps_THE, b_THK, c_THK = (
            part if norm is None else norm(part)
            for part, norm in zip(self._selected(x_TI), self._norms, strict=True)
        )
        step_TI = F.softplus(self._steps(steps_THE).float() + self._step_bias_I)
        y_TI = self._scan(x_TI.float(), b_THK.float(), c_THK.float(), step_TI, cache, batch)
        if self.keeps_outputs:
            self.outputs_TI = y_TI
        return self._output((y_TI * F.silu(gate_TI.float())).to(dtype))

    def _selected(self, x_TI: Tensor) -> Sequence[Tensor]:
        """Return the vector for the time steps [T, H, E], B and C [T, H, K] before their norms."""
        selected_THX, (rank, *sizes) = self._selection(x_TI), self._sizes
        if not self._is_step_last:
            return selected_THX.split(self._sizes, -1)
        b_THK, c_THK, steps_THE = selected_THX.split((*sizes, rank), -1)
        return steps_THE, b_THK, c_THK

    def _scan(
        self,
        x_TI: Tensor,
        b_THK: Tensor,
        c_THK: Tensor,
        step_TI: Tensor,
        cache: StateCache,
        batch: StateBatch,
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens."""
        states_SIK = cache.load(batch).unflatten(1, self._a_IK.shape)
        y_TI, heads = x_TI * self._skip_I, (self._num_heads, -1)
        # A segment is one token, and the tokens of a request follow each other.
        for part in batch.rounds:
            tokens, requests = part.segments, part.requests
            step_RI1 = step_TI[tokens].unsqueeze(-1)
            added_RI1 = step_RI1 * x_TI[tokens].unsqueeze(-1)
            added_RHWK = added_RI1.unflatten(1, heads) * b_THK[tokens].unsqueeze(2)
            decay_RIK = (step_RI1 * self._a_IK).exp()
            states_RIK = states_SIK[requests] * decay_RIK + added_RHWK.flatten(1, 2)
            states_SIK[requests] = states_RIK
            # A product with a single row sums in another order, so double the row.
            c_XK2 = c_THK[tokens].flatten(0, 1).unsqueeze(-1).expand(-1, -1, 2)
            states_XWK = states_RIK.unflatten(1, heads).flatten(0, 1)
            y_RI = torch.bmm(states_XWK, c_XK2)[..., 0].view(len(tokens), -1)
            y_TI.index_add_(0, tokens, y_RI)
        cache.store(states_SIK.flatten(1), batch)
        return y_TI


def _norm(layer: Mamba1, weights: WeightReader, name: str, size: int) -> RMSNorm | None:
    if layer.norm_eps is None:
        return None
    weight = torch.ones(size, device=weights.device)
    if layer.has_norm_weights:
        weight = weights.read_vector(name, size)
    return RMSNorm(weight, layer.norm_eps)


def read_channels(layer: Mamba1, weights: WeightReader, name: str, own: range) -> Tensor:
    """Return a stored number for each of these channels, float32 [I]. The channels of a head may have one in common."""
    size = layer.head_dim or 1
    return weights.read_elements(name, layer.channels // size).repeat_interleave(size)[
        own.start : own.stop
    ]


def read_decay(layer: Mamba1, weights: WeightReader, prefix: str, own: range) -> Tensor:
    """Return the factors of time steps that give the logarithms of these channels' decays, float32 [I, K]."""
    name, size = f"{prefix}A_log", layer.state_size_per_channel
    if layer.head_dim:
        return -read_channels(layer, weights, name, own).exp().unsqueeze(1).repeat(1, size)
    log_a = weights.read_elements(name, layer.channels * size).view(layer.channels, size)
    return -log_a[own.start : own.stop].exp()


def step_rows(layer: Mamba1, name: str, own: range) -> Rows:
    """Return the rows of the matrix called `name` that give these channels' time steps."""
    if not layer.head_dim:
        return Rows(name, layer.channels, own)
    size = layer.head_dim
    heads = range(own.start // size, own.stop // size)
    return Rows(
        name,
        layer.channels // size,
        heads,
        torch.arange(len(heads)).repeat_interleave(size),
        has_bias=False,
    )


def own_channels(layer: Mamba1, tensor_parallel: TensorParallel) -> range:
    """Return the channels of this rank."""
    heads = tensor_parallel.part(layer.num_units)
    return elements(heads, layer.channels // layer.num_units)
