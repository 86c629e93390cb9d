"""Kimi delta attention (Kimi Linear, 2025, arXiv 2510.26692): a delta rule with a decay per key element.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H heads of this shard, K key dimension,
V value dimension, F channels of an input, W inputs before a segment that the convolution reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import KimiDeltaAttention
from ...layers.layers import Linear
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .delta_rule import delta_rule, unit
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache


class KimiDeltaAttentionMixer(Mixer):
    """Linear attention with the delta rule. Decays and output gates may come from low-rank projections."""

    def __init__(self, layer: KimiDeltaAttention, source: LayerSource) -> None:
        super().__init__(layer, source)
        spec, weights, prefix, shard, _ = source
        self._layer, dim = layer, layer.head_dim
        heads = shard.tensor_parallel.part(layer.num_heads)
        own, size = elements(heads, dim), layer.num_heads * dim
        self._num_heads = len(heads)
        self._decay: Linear | None = None
        self._gate: Linear | None = None
        if layer.is_low_rank:
            self._decay = source.read_linear("f_b_proj", size, dim, own)
        if layer.has_low_rank_gates:
            self._gate = source.read_linear("g_b_proj", size, dim, own)
        a_H = weights.read_elements(f"{prefix}A_log", layer.num_heads)
        self._a_H1 = -a_H[heads.start : heads.stop].exp().unsqueeze(-1)
        self._step_bias_X = weights.read_vector(f"{prefix}dt_bias", size, own)
        self._norm_V = weights.read_vector(f"{prefix}norm.weight", dim)
        self._norm_eps = spec.norm_eps

    @staticmethod
    def rows(
        layer: KimiDeltaAttention,
        weights: WeightReader,
        prefix: str,
        tensor_parallel: TensorParallel,
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to queries, keys, values, strengths, and decays and gates.

        Low-rank decays and gates have second projections, which read these rows.
        """
        heads, dim = tensor_parallel.part(layer.num_heads), layer.head_dim
        size, own = layer.num_heads * dim, elements(heads, dim)
        projection = [Rows(f"{prefix}{each}_proj", size, own) for each in "qkv"]
        projection.append(Rows(f"{prefix}b_proj", layer.num_heads, heads))
        for each, has_low_rank in (("f", layer.is_low_rank), ("g", layer.has_low_rank_gates)):
            if has_low_rank:
                projection.append(Rows(f"{prefix}{each}_a_proj", dim, range(dim)))
            else:
                projection.append(Rows(f"{prefix}{each}_proj", size, own))
        convolution = [Rows(f"{prefix}{each}_conv1d", size, own) for each in "qkv"]
        return MixerRows(projection, convolution, layer.num_heads, dim)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer, num_heads = self._layer, self._num_heads
        size = num_heads * layer.head_dim
        of_decay = layer.head_dim if layer.is_low_rank else size
        of_gate = layer.head_dim if layer.has_low_rank_gates else size
        qkv_and_strength_TX, decay_TX, gate_TX = self.projection(x).split(
            (3 * size + num_heads, of_decay, of_gate), -1
        )
        if self._decay is not None:
            decay_TX = self._decay(decay_TX.contiguous())
        if self._gate is not None:
            gate_TX = self._gate(gate_TX.contiguous())
        dtype = gate_TX.dtype
        inputs_TF = torch.cat((qkv_and_strength_TX, decay_TX), -1)
        cache = StateCache(memory, self._size, dtype)
        inputs_NXF = cache.all_inputs(inputs_TF, batch)[batch.inputs_of_segments]
        qkv_NXF, strength_NXH, step_NXF = inputs_NXF.split((3 * size, num_heads, size), -1)
        q_NCX, k_NCX, v_NCX = F.silu(self._conv(qkv_NXF)).to(dtype).float().chunk(3, -1)
        window = layer.kernel - 1
        strength_NCH = strength_NXH[:, window:].sigmoid().float()
        step_NCX = step_NXF[:, window:].float() + self._step_bias_X
        step_NCHK = step_NCX.unflatten(-1, (num_heads, -1))
        if layer.lowest_log_decay:
            step_NCHK = layer.lowest_log_decay * torch.sigmoid(step_NCHK * -self._a_H1)
        else:
            step_NCHK = F.softplus(step_NCHK) * self._a_H1
        y_NHCV = delta_rule(
            unit(q_NCX, layer.head_dim).transpose(1, 2) * layer.head_dim**-0.5,
            unit(k_NCX, layer.head_dim).transpose(1, 2),
            v_NCX.unflatten(-1, (num_heads, -1)).transpose(1, 2),
            strength_NCH.transpose(1, 2).unsqueeze(-1),
            step_NCHK.transpose(1, 2).cumsum(-2),
            cache,
            batch,
        )
        y_THV = y_NHCV.transpose(1, 2).flatten(0, 1)[batch.tokens].to(dtype).float()
        y_THV = torch.rms_norm(y_THV, (layer.head_dim,), self._norm_V, self._norm_eps)
        gate_THV = gate_TX.float().sigmoid().unflatten(-1, (num_heads, -1))
        return self._output((y_THV * gate_THV).to(dtype).flatten(1))
