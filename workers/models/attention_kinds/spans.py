"""Attention beside a convolution whose taps depend on the token (ConvBERT, arXiv 2008.02496).

Shapes: T tokens of a step, D hidden size, H heads of this shard, K head dimension, F = H * K, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from ..positions.neighbors import neighbor_rows
from ..weights import Rows
from .kind import Attend, AttentionKind


class SpanAttention(AttentionKind):
    """Heads that attend, and as many heads that sum the values near a token, with weights that depend on the token.

    These weights are the softmax of a projection of the token's query, times a convolution of the hidden states.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, kernels = source
        self._head_dim, self._num_taps = spec.head_dim, spec.num_span_taps
        heads, hidden = shard.heads(spec), spec.hidden_size
        total, part = spec.num_heads * spec.head_dim, elements(heads, spec.head_dim)
        rows = [Rows(f"{prefix}{x}_proj", total, part) for x in "qkv"]
        self._qkv = source.read_rows(rows, hidden, has_biases=True)
        name = f"{prefix}key_conv_attn_layer."
        taps_DW = weights.read_float32(f"{name}depthwise.weight", hidden, 1, self._num_taps)
        self._taps_WD = taps_DW[:, 0].T.contiguous()
        pointwise = weights.read(f"{name}pointwise.weight", total, hidden, 1, part=part)
        bias_F = weights.read_elements(f"{name}bias", total)[part.start : part.stop]
        self._pointwise = kernels.linear(pointwise[..., 0].contiguous(), bias_F.to(pointwise))
        # Every head's taps depend on the queries of all heads.
        self._own_taps = elements(heads, self._num_taps)
        self._to_taps = source.read_columns(
            "conv_kernel_layer", spec.num_heads * self._num_taps, total, part, has_bias=True
        )
        values = Rows(f"{prefix}conv_out_layer", total, part)
        self._values = source.read_rows([values], hidden, has_biases=True)
        both = [part, range(total + part.start, total + part.stop)]
        self._output = source.read_columns("o_proj", hidden, 2 * total, both, has_bias=True)

    def _compute(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        q_TF, k_TF, v_TF = self._qkv(x_TD).chunk(3, -1)
        q_THK, k_THK, v_THK, near_THK = (
            each.unflatten(-1, (-1, self._head_dim))
            for each in (q_TF, k_TF, v_TF, self._values(x_TD))
        )
        attended_THK = attend(torch.cat((q_THK, k_THK), 1), v_THK)
        weights_THW = self._weights(x_TD, q_TF, positions_T)
        summed_THK = torch.zeros_like(near_THK, dtype=torch.float32)
        for tap, offset in enumerate(self._offsets):
            row_THK = neighbor_rows(near_THK, positions_T, offset)
            summed_THK += weights_THW[..., tap, None] * row_THK
        summed_TF = summed_THK.to(x_TD.dtype).flatten(1)
        return self._output(torch.cat((attended_THK.flatten(1), summed_TF), 1))

    @property
    def _offsets(self) -> range:
        """The distances of the taps from the token, in positions."""
        half = self._num_taps // 2
        return range(-half, half + 1)

    def _weights(self, x_TD: Tensor, q_TF: Tensor, positions_T: Tensor) -> Tensor:
        """Return the weights of the values near each token, float32 [T, H, W]."""
        convolved_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for tap_D, offset in zip(self._taps_WD, self._offsets, strict=True):
            convolved_TD += neighbor_rows(x_TD, positions_T, offset) * tap_D
        keys_TF = self._pointwise(convolved_TD.to(x_TD.dtype))
        taps_TX = self._to_taps(keys_TF * q_TF)[:, self._own_taps.start : self._own_taps.stop]
        return taps_TX.unflatten(-1, (-1, self._num_taps)).float().softmax(-1)
