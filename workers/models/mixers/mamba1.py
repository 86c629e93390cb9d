"""Mamba (Gu and Dao, 2023, arXiv 2312.00752), computed token by token.

Shapes: T tokens of a step, D hidden size, I channels of this shard, K elements of a channel's state, E rank of the time
steps, S requests, R requests of a round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Mamba1
from ...layers.layers import LayerKernels, RMSNorm
from ...layers.parallel.parallel_layers import RowParallelLinear
from ...layers.parallel.shard import ModelShard
from ...layers.parallel.tensor_parallel import TensorParallel
from ...layers.spec import ModelSpec
from ..weights import Rows, WeightReader
from .mixer import CausalConvolution, Mixer, read_parts, segments
from .states import StateBatch, StateCache


class Mamba1Mixer(Mixer):
    """A state-space layer in which each element of a state has its own decay per token."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: Mamba1,
        weights: WeightReader,
        prefix: str,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        tensor_parallel, channels = shard.tensor_parallel, layer.channels
        self._layer = layer
        own = tensor_parallel.part(channels)
        rows = projection_rows(layer, prefix, tensor_parallel)
        self.projection = kernels.linear(
            weights.read_matrix_rows(rows, spec.hidden_size),
            weights.read_biases(rows) if layer.has_bias else None,
        )
        self._conv = CausalConvolution(
            read_parts(weights, f"{prefix}conv1d.weight", (channels, 1, layer.kernel), [own]),
            read_parts(weights, f"{prefix}conv1d.bias", (channels,), [own])
            if layer.conv_bias
            else None,
        )
        self._sizes = [layer.step_rank, layer.state_size_per_channel, layer.state_size_per_channel]
        self._selection = RowParallelLinear(
            weights.read_matrix(f"{prefix}x_proj.weight", sum(self._sizes), channels, own, dim=1),
            None,
            tensor_parallel,
            kernels,
        )
        self._norms = [
            _norm(layer, weights, f"{prefix}{name}_layernorm.weight", size)
            for name, size in zip(("dt", "b", "c"), self._sizes, strict=True)
        ]
        step_rows = [Rows(f"{prefix}dt_proj", channels, own)]
        self._steps = kernels.linear(weights.read_matrix_rows(step_rows, layer.step_rank), None)
        self._step_bias_I = weights.read_vector(f"{prefix}dt_proj.bias", channels, own)
        log_a = weights.read_elements(f"{prefix}A_log", channels * layer.state_size_per_channel)
        self._a_IK = -log_a.unflatten(0, (channels, -1))[own.start : own.stop].exp()
        self._skip_I = weights.read_vector(f"{prefix}D", channels, own)
        self._output = RowParallelLinear(
            weights.read_matrix(f"{prefix}out_proj.weight", spec.hidden_size, channels, own, dim=1),
            weights.read(f"{prefix}out_proj.bias", spec.hidden_size) if layer.has_bias else None,
            tensor_parallel,
            kernels,
        )
        self._size = layer.state_size(tensor_parallel.size)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        inputs_TI, gate_TI = self.projection(x).chunk(2, -1)
        dtype = inputs_TI.dtype
        cache = StateCache(memory, self._size, dtype)
        inputs_TXI = cache.all_inputs(inputs_TI, batch)[batch.inputs_of_segments]
        x_TI = F.silu(self._conv(inputs_TXI)).flatten(0, 1)[batch.tokens].to(dtype)
        steps_TE, b_TK, c_TK = (
            part if norm is None else norm(part)
            for part, norm in zip(
                self._selection(x_TI).split(self._sizes, -1), self._norms, strict=True
            )
        )
        step_TI = F.softplus(self._steps(steps_TE.contiguous()).float() + self._step_bias_I)
        y_TI = self._scan(x_TI.float(), b_TK.float(), c_TK.float(), step_TI, cache, batch)
        return self._output((y_TI * F.silu(gate_TI.float())).to(dtype))

    def _scan(
        self,
        x_TI: Tensor,
        b_TK: Tensor,
        c_TK: Tensor,
        step_TI: Tensor,
        cache: StateCache,
        batch: StateBatch,
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens."""
        states_SIK = cache.load(batch).unflatten(1, self._a_IK.shape)
        y_TI = x_TI * self._skip_I
        # A segment is one token, and the tokens of a request follow each other.
        for part in batch.rounds:
            tokens, requests = part.segments, part.requests
            step_RI1 = step_TI[tokens].unsqueeze(-1)
            added_RIK = (step_RI1 * x_TI[tokens].unsqueeze(-1)) * b_TK[tokens].unsqueeze(1)
            states_RIK = states_SIK[requests] * (step_RI1 * self._a_IK).exp() + added_RIK
            states_SIK[requests] = states_RIK
            # A product with a single row sums in another order, so double the row.
            c_RK2 = c_TK[tokens].unsqueeze(-1).expand(-1, -1, 2)
            y_TI.index_add_(0, tokens, torch.bmm(states_RIK, c_RK2)[..., 0])
        cache.store(states_SIK.flatten(1), batch)
        return y_TI


def _norm(layer: Mamba1, weights: WeightReader, name: str, size: int) -> RMSNorm | None:
    if layer.norm_eps is None:
        return None
    weight = torch.ones(size, device=weights.device)
    if layer.has_norm_weights:
        weight = weights.read_vector(name, size)
    return RMSNorm(weight, layer.norm_eps)


def projection_rows(layer: Mamba1, prefix: str, tensor_parallel: TensorParallel) -> list[Rows]:
    """Return this rank's rows of the projections to the inputs and to their gates."""
    own = tensor_parallel.part(layer.channels)
    return segments(f"{prefix}in_proj", [layer.channels] * 2, [own] * 2)
