"""The recurrent layer of Jet-Nemotron (arXiv 2508.15884): a gated delta net, and taps of each token for its values.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H heads of this shard, K key dimension,
V value dimension, X = H * K, Y = H * V, W taps, F channels of an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.state_spaces.jet import JetBlock
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .delta_rule import delta_rule, unit
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache


class JetBlockMixer(Mixer):
    """A gated delta net whose values are convolved with taps that depend on the token."""

    def __init__(self, layer: JetBlock, source: LayerSource) -> None:
        super().__init__(layer, source)
        _, weights, prefix, shard, _ = source
        heads = shard.tensor_parallel.part(layer.num_heads)
        self._layer, self._num_heads = layer, len(heads)
        count = layer.num_heads * layer.value_dim * layer.kernel
        own = elements(heads, layer.value_dim * layer.kernel)
        self._taps = source.read_linear("taps.w2", count, layer.tap_rank, own, has_bias=True)
        a_H = weights.read_elements(f"{prefix}A_log", layer.num_heads)
        self._a_H = -a_H[heads.start : heads.stop].exp()
        self._step_bias_H = weights.read_vector(f"{prefix}dt_bias", layer.num_heads, heads)
        self._norm_V = weights.read_vector(f"{prefix}norm.weight", layer.value_dim)

    @staticmethod
    def rows(
        layer: JetBlock, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`.

        The projections are those to queries, keys, values, strengths, time steps, gates, and the vector of taps.
        """
        heads = tensor_parallel.part(layer.num_heads)
        sizes = {"q": layer.key_dim, "k": layer.key_dim, "v": layer.value_dim, "b": 1, "a": 1}
        projection = [
            Rows(f"{prefix}{name}_proj", layer.num_heads * size, elements(heads, size))
            for name, size in (sizes | {"g": layer.value_dim}).items()
        ]
        projection.append(Rows(f"{prefix}taps.w1", layer.tap_rank, range(layer.tap_rank)))
        return MixerRows(projection, [], layer.num_heads, layer.value_dim)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer, num_heads = self._layer, self._num_heads
        keys, values = num_heads * layer.key_dim, num_heads * layer.value_dim
        qk_TX, value_TY, steps_TX, gate_TY, vector_TX = self.projection(x).split(
            (2 * keys, values, 2 * num_heads, values, layer.tap_rank), -1
        )
        dtype = value_TY.dtype
        raw, others = StateCache(memory, self._size, dtype).split(values)
        taps_TYW = self._taps(F.silu(vector_TX).contiguous()).unflatten(1, (-1, layer.kernel))
        window_NFY = raw.all_inputs(value_TY, batch)[batch.inputs_of_segments]
        value_TY = _convolved(window_NFY, taps_TYW, batch).to(dtype)
        inputs_TF = torch.cat((F.silu(qk_TX), value_TY, steps_TX), -1)
        inputs_NXF = others.all_inputs(inputs_TF, batch)[batch.inputs_of_segments]
        # Only the values before their convolution are read beyond the segment.
        inputs_NCF = inputs_NXF[:, layer.kernel - 1 :].float()
        q_NCX, k_NCX, v_NCY, strength_NCH, step_NCH = inputs_NCF.split(
            (keys, keys, values, num_heads, num_heads), -1
        )
        step_NCH = F.softplus(step_NCH + self._step_bias_H) * self._a_H
        y_NHCV = delta_rule(
            unit(q_NCX, layer.key_dim).transpose(1, 2) * layer.key_dim**-0.5,
            unit(k_NCX, layer.key_dim).transpose(1, 2),
            v_NCY.unflatten(-1, (num_heads, -1)).transpose(1, 2),
            strength_NCH.sigmoid().transpose(1, 2).unsqueeze(-1),
            step_NCH.transpose(1, 2).cumsum(-1).unsqueeze(-1),
            others,
            batch,
        )
        y_THV = y_NHCV.transpose(1, 2).flatten(0, 1)[batch.tokens].to(dtype).float()
        y_THV = torch.rms_norm(y_THV, (layer.value_dim,), self._norm_V, layer.norm_eps)
        gate_THV = F.silu(gate_TY.float()).unflatten(-1, (num_heads, -1))
        return self._output((y_THV * gate_THV).to(dtype).flatten(1))


def _convolved(window_NFY: Tensor, taps_TYW: Tensor, batch: StateBatch) -> Tensor:
    """Return SiLU of the sums of each token's last values, times its own taps, float32 [T, Y]."""
    windows_NCYW = window_NFY.float().unfold(1, taps_TYW.shape[-1], 1)
    windows_TYW = windows_NCYW.flatten(0, 1)[batch.tokens]
    first, *others = (windows_TYW * taps_TYW.float()).unbind(-1)
    return F.silu(sum(others, first))
