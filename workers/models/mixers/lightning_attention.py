"""Lightning attention (MiniMax-01, 2025, arXiv 2501.08313): linear attention with a fixed decay for each head.

Ling 2.5 has rotations in its queries and keys, and norms of groups of heads.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H heads of this shard, K head dimension,
F channels of an input, R requests of a round, S requests.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import LightningAttention
from ...layers.layers import GroupedNorm, RMSNorm
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ...layers.rope import apply_rotary
from ...layers.spec import ModelSpec
from ..layer_source import LayerSource
from ..mlp import DividedNorm
from ..weights import Rows, WeightReader
from .mamba2 import causal_decay
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache

_NORM_EPS = 1e-6
HEAD_NORMS = ("k_norm", "q_norm")
"""The norms of each head, in the order of the inputs."""


class LightningAttentionMixer(Mixer):
    """Linear attention whose state decays at a rate that depends on the layer and the head."""

    def __init__(self, layer: LightningAttention, source: LayerSource) -> None:
        super().__init__(layer, source)
        spec, weights, prefix, shard, _ = source
        heads = shard.tensor_parallel.part(layer.num_heads)
        own, size = elements(heads, layer.head_dim), layer.num_heads * layer.head_dim
        self._num_heads, self._layer = len(heads), layer
        slopes_H = decay_slopes(spec, layer, prefix)[heads.start : heads.stop]
        self._slopes_H = slopes_H.to(weights.device)
        weight_I, eps = (
            weights.read_vector(f"{prefix}norm.weight", size, own),
            norm_eps(spec, layer),
        )
        self._norm: DividedNorm | GroupedNorm = DividedNorm(weight_I, eps, size, shard)
        if layer.norm_groups > 1:
            self._norm = GroupedNorm(weight_I, eps, layer.norm_groups * len(own) // size)
        self._head_norms = [
            RMSNorm(weights.read_vector(f"{prefix}{name}.weight", layer.head_dim), eps)
            for name in HEAD_NORMS
            if layer.norms_heads
        ]

    @staticmethod
    def rows(
        layer: LightningAttention,
        weights: WeightReader,
        prefix: str,
        tensor_parallel: TensorParallel,
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to gates, values, keys and queries."""
        heads, dim = tensor_parallel.part(layer.num_heads), layer.head_dim
        size, own = layer.num_heads * dim, elements(heads, 3 * dim)
        gate = Rows(f"{prefix}output_gate", size, elements(heads, dim))
        if layer.is_rotated:
            parts = elements(heads, dim)
            if layer.has_separate_projections:
                rows = [Rows(f"{prefix}{name}_proj", size, parts) for name in "vkq"]
                return MixerRows([gate, *rows], [], layer.num_units, size // layer.num_units)
            # The module has all queries, then all keys and all values.
            starts = (2 * size, size, 0)
            ranges = (range(start + parts.start, start + parts.stop) for start in starts)
            rows = [Rows(f"{prefix}qkv_proj", 3 * size, part) for part in ranges]
            return MixerRows([gate, *rows], [], layer.num_units, size // layer.num_units)
        # Each head's query is followed by its key and its value.
        query, key, value = torch.arange(len(own)).view(-1, 3, dim).unbind(1)
        orders = (value, key, query)
        return MixerRows(
            [
                gate,
                *(Rows(f"{prefix}qkv_proj", 3 * size, own, order.flatten()) for order in orders),
            ],
            [],
            layer.num_heads,
            dim,
        )

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        channels = self._size.channels
        gate_TI, inputs_TF = self.projection(x).split((channels // 3, channels), -1)
        cache = StateCache(memory, self._size, inputs_TF.dtype)
        inputs_TF = self._rotated(inputs_TF) if self._layer.is_rotated else F.silu(inputs_TF)
        inputs_NCF = cache.all_inputs(inputs_TF, batch)[batch.inputs_of_segments].float()
        v_NHCK, k_NHCK, q_NHCK = (
            part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for part in inputs_NCF.chunk(3, -1)
        )
        y_NHCK = self._scan(v_NHCK, k_NHCK, q_NHCK, cache, batch)
        y_TI = y_NHCK.transpose(1, 2).flatten(2).flatten(0, 1)[batch.tokens]
        return self._output((self._norm(y_TI) * gate_TI.float().sigmoid()).to(inputs_TF.dtype))

    def _rotated(self, inputs_TF: Tensor) -> Tensor:
        """Return values, and normed and rotated keys and queries."""
        assert self.tables is not None
        value_TI, *others = inputs_TF.chunk(3, -1)
        key_THK, query_THK = (each.unflatten(-1, (self._num_heads, -1)) for each in others)
        if self._head_norms:
            key_norm, query_norm = self._head_norms
            key_THK, query_THK = key_norm(key_THK), query_norm(query_THK)
        query_THK = query_THK * self._layer.head_dim**-0.5
        rotated = (apply_rotary(each, self.tables).flatten(1) for each in (key_THK, query_THK))
        return torch.cat((value_TI, *rotated), -1)

    def _scan(
        self, v_NHCK: Tensor, k_NHCK: Tensor, q_NHCK: Tensor, cache: StateCache, batch: StateBatch
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens of all segments."""
        steps_C = torch.arange(1, v_NHCK.shape[-2] + 1, device=v_NHCK.device)
        log_decay_HC = -self._slopes_H[:, None] * steps_C
        y_NHCK = (q_NHCK @ k_NHCK.transpose(-1, -2)) * causal_decay(log_decay_HC[None]) @ v_NHCK
        q_NHCK = q_NHCK * log_decay_HC.exp().unsqueeze(-1)
        last_H1 = log_decay_HC[:, -1:]
        k_NHCK = k_NHCK * (last_H1 - log_decay_HC).exp().unsqueeze(-1)
        decay_H11 = last_H1.exp().unsqueeze(-1)
        states_SHKK = cache.load(batch).unflatten(1, (self._num_heads, -1, v_NHCK.shape[-1]))
        for part in batch.rounds:
            states_RHKK = states_SHKK[part.requests]
            y_NHCK.index_add_(0, part.segments, q_NHCK[part.segments] @ states_RHKK)
            if part.num_full:
                full = part.segments[: part.num_full]
                added_RHKK = k_NHCK[full].transpose(-1, -2) @ v_NHCK[full]
                decayed_RHKK = states_RHKK[: part.num_full] * decay_H11
                part.replace_states(states_SHKK, decayed_RHKK + added_RHKK)
        cache.store(states_SHKK.flatten(1), batch)
        return y_NHCK


def decay_slopes(spec: ModelSpec, layer: LightningAttention, prefix: str) -> Tensor:
    """Return the negative logarithm of each head's decay per token, in the layer with this prefix."""
    match = re.search(r"layers\.(\d+)\.", prefix)
    assert match is not None, "the prefix names the layer"
    depth = int(match[1]) / (len(spec.layers) - 1 + 1e-5)
    if not layer.has_layer_decays:
        depth = 1e-5
    elif layer.is_rotated:
        depth = (int(match[1]) - 1) / max(1, len(spec.layers) - 1)
    exponents_H = torch.arange(1, layer.num_heads + 1)
    slopes_H: Tensor = (2.0 ** (-8 / layer.num_heads)) ** exponents_H
    return slopes_H * (1 - depth + 1e-5)


def norm_eps(spec: ModelSpec, layer: LightningAttention) -> float:
    """Return the epsilon of the outputs' norm. With a norm of all heads, it does not depend on the model's."""
    return spec.norm_eps if layer.is_rotated else _NORM_EPS
