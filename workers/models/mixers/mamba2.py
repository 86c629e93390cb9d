"""Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060), computed segment by segment.

Within a segment, a token's output is a sum over the segment's tokens, plus a product with the state at the start of the
segment.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H heads and G groups of this shard, P head
dimension, K elements of the state per element of a head, I = H * P, F channels of an input, R requests of a round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Mamba2
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import WeightReader
from .mixer import Mixer, MixerRows, segments
from .states import StateBatch, StateCache


class Mamba2Mixer(Mixer):
    """A state-space layer in which each head has one decay per token."""

    def __init__(self, layer: Mamba2, source: LayerSource) -> None:
        super().__init__(layer, source)
        spec, weights, prefix, shard, _ = source
        tensor_parallel = shard.tensor_parallel
        self._layer, self._tensor_parallel = layer, tensor_parallel
        heads = tensor_parallel.part(layer.num_heads)
        self._num_heads = len(heads)
        self._num_groups = len(tensor_parallel.part(layer.num_groups))
        self._multipliers_O: Tensor | None = None
        if layer.multipliers:
            factors = column_multipliers(layer, self.rows(layer, weights, prefix, tensor_parallel))
            self._multipliers_O = factors.to(weights.device, weights.dtype)
        self._a_H = -weights.read_vector(f"{prefix}A_log", layer.num_heads, heads).exp()
        self._skip_H1 = weights.read_vector(f"{prefix}D", layer.num_heads, heads)[:, None]
        self._step_bias_H = weights.read_vector(f"{prefix}dt_bias", layer.num_heads, heads)
        self._norm_I: Tensor | None = None
        if layer.norm_groups:
            size, own = layer.num_heads * layer.head_dim, elements(heads, layer.head_dim)
            self._norm_I = weights.read_vector(f"{prefix}norm.weight", size, own)
        self._norm_eps = spec.norm_eps if layer.norm_eps is None else layer.norm_eps

    @staticmethod
    def rows(
        layer: Mamba2, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to the gate, x, B, C and the time steps."""
        size = layer.num_heads * layer.head_dim
        states = layer.num_groups * layer.state_size_per_head
        heads, groups = (
            tensor_parallel.part(count) for count in (layer.num_heads, layer.num_groups)
        )
        own = elements(heads, layer.head_dim)
        own_states = elements(groups, layer.state_size_per_head)
        sizes, parts = [size, states, states], [own, own_states, own_states]
        return MixerRows(
            segments(f"{prefix}in_proj", [size, *sizes, layer.num_heads], [own, *parts, heads]),
            segments(f"{prefix}conv1d", sizes, parts),
            layer.num_heads,
            layer.head_dim,
            has_projection_bias=layer.projection_bias,
            has_convolution_bias=layer.conv_bias,
            has_output_bias=layer.output_bias,
        )

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer = self._layer
        size = self._num_heads * layer.head_dim
        states = self._num_groups * layer.state_size_per_head
        projected_TO = self.projection(x)
        if self._multipliers_O is not None:
            projected_TO = projected_TO * self._multipliers_O
        gate_TI, inputs_TF = projected_TO.split((size, self._size.channels), -1)
        cache = StateCache(memory, self._size, inputs_TF.dtype)
        inputs_NXF = cache.all_inputs(inputs_TF, batch)[batch.inputs_of_segments]
        convolved_NXF, step_NXH = inputs_NXF.split((size + 2 * states, self._num_heads), -1)
        convolved_NCF = F.silu(self._conv(convolved_NXF)).to(inputs_TF.dtype).float()
        x_NCI, b_NCK, c_NCK = convolved_NCF.split((size, states, states), -1)
        step_NCH = F.softplus(step_NXH[:, layer.kernel - 1 :].float() + self._step_bias_H)
        y_NHCP = self._scan(
            x_NCI.unflatten(-1, (self._num_heads, -1)).transpose(1, 2),
            b_NCK.unflatten(-1, (self._num_groups, -1)).transpose(1, 2),
            c_NCK.unflatten(-1, (self._num_groups, -1)).transpose(1, 2),
            step_NCH.clamp(layer.min_step, layer.max_step).transpose(1, 2),
            cache,
            batch,
        )
        y_TI = y_NHCP.transpose(1, 2).flatten(2).flatten(0, 1)[batch.tokens]
        return self._output(self._gated(y_TI, gate_TI.float()).to(inputs_TF.dtype))

    def _scan(
        self,
        x_NHCP: Tensor,
        b_NGCK: Tensor,
        c_NGCK: Tensor,
        step_NHC: Tensor,
        cache: StateCache,
        batch: StateBatch,
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens of all segments."""
        repeats = self._num_heads // self._num_groups
        log_decay_NHC = (step_NHC * self._a_H[:, None]).cumsum(-1)
        weights_NHCC = causal_decay(log_decay_NHC) * step_NHC.unsqueeze(-2)
        scores_NGCC = c_NGCK @ b_NGCK.transpose(-1, -2)
        weights_NHCC *= scores_NGCC.repeat_interleave(repeats, 1)
        y_NHCP = weights_NHCC @ x_NHCP + self._skip_H1.unsqueeze(-1) * x_NHCP
        c_NHCK = c_NGCK.repeat_interleave(repeats, 1) * log_decay_NHC.exp().unsqueeze(-1)
        last_NH1 = log_decay_NHC[..., -1:]
        b_NHCK = b_NGCK.repeat_interleave(repeats, 1)
        b_NHCK = b_NHCK * (step_NHC * (last_NH1 - log_decay_NHC).exp()).unsqueeze(-1)
        decay_NH11 = last_NH1.exp().unsqueeze(-1)
        states_SHKP = cache.load(batch).unflatten(1, (self._num_heads, -1, x_NHCP.shape[-1]))
        for part in batch.rounds:
            states_RHKP = states_SHKP[part.requests]
            y_NHCP.index_add_(0, part.segments, c_NHCK[part.segments] @ states_RHKP)
            if part.num_full:
                full = part.segments[: part.num_full]
                added_RHKP = b_NHCK[full].transpose(-1, -2) @ x_NHCP[full]
                decayed_RHKP = states_RHKP[: part.num_full] * decay_NH11[full]
                part.replace_states(states_SHKP, decayed_RHKP + added_RHKP)
        cache.store(states_SHKP.flatten(1), batch)
        return y_NHCP

    def _gated(self, y_TI: Tensor, gate_TI: Tensor) -> Tensor:
        layer, gate_TI = self._layer, F.silu(gate_TI)
        if self._norm_I is None:
            return y_TI * gate_TI
        if layer.gates_before_norm:
            return self._normed(y_TI * gate_TI)
        return self._normed(y_TI) * gate_TI

    def _normed(self, y_TI: Tensor) -> Tensor:
        """Return the outputs normed over each group, whose elements several ranks may share."""
        assert self._norm_I is not None
        tensor_parallel, layer = self._tensor_parallel, self._layer
        num_own = max(1, layer.norm_groups // tensor_parallel.size)
        y_TGX = y_TI.unflatten(-1, (num_own, -1))
        squares_TG1 = y_TGX.square().mean(-1, keepdim=True)
        if layer.norm_groups < tensor_parallel.size:
            squares_TG1 = tensor_parallel.stack(squares_TG1).mean(0)
        return (y_TGX * (squares_TG1 + self._norm_eps).rsqrt()).flatten(1) * self._norm_I


def column_multipliers(layer: Mamba2, rows: MixerRows) -> Tensor:
    """Return the factor of each column of this rank's projection, float32."""
    counts = torch.tensor([len(part.part) for part in rows.projection])
    return torch.tensor(layer.multipliers).repeat_interleave(counts)


def causal_decay(log_decay_NHC: Tensor) -> Tensor:
    """Return the decay from each token of a segment to each later one [N, H, C, C], and 0 for earlier ones."""
    difference_NHCC = log_decay_NHC.unsqueeze(-1) - log_decay_NHC.unsqueeze(-2)
    length = difference_NHCC.shape[-1]
    is_later = torch.ones((length, length), dtype=torch.bool, device=difference_NHCC.device).triu_(
        1
    )
    return difference_NHCC.masked_fill_(is_later, -torch.inf).exp_()
