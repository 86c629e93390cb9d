"""Attention within blocks of tokens, and to global tokens, which read all (Pegasus-X, arXiv 2208.04347).

A step computes one whole text, as that of an encoder of sources, and no cache is used.

Shapes: G global tokens, T tokens of the text, A = G + T, D hidden size, H heads of this shard, K elements of a head.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from ..norms import read_norm
from .kind import Attend, AttentionKind

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")


class GlobalTokenAttention(AttentionKind):
    """Attention in both directions, which reads the global tokens before those of the text. Each kind has a norm."""

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, kernels = source
        assert layer.token_blocks is not None
        self._blocks, self._num_global = layer.token_blocks, spec.num_global_tokens
        self._scale, self._size = spec.attention_scale, spec.head_dim
        total, part = spec.num_heads * self._size, elements(shard.heads(spec), self._size)
        rows = weights.rows(prefix, [*_PROJECTIONS], [total] * 3, [part] * 3)
        self._project = source.read_rows(rows, spec.hidden_size)
        self._output = source.read_columns("o_proj", spec.hidden_size, total, part)
        self._global_norm, self._norm = (
            read_norm(spec, weights, f"{prefix}{name}_norm", kernels) for name in ("global", "text")
        )

    def _compute(self, x_AD: Any, positions_T: Tensor, attend: Attend) -> Tensor:
        own, count = self._num_global, len(x_AD)
        normed_AD = torch.cat((self._global_norm(x_AD[:own]), self._norm(x_AD[own:])))
        projected = self._project(normed_AD).unflatten(-1, (3, -1, self._size))
        q_HAK, k_HAK, v_HAK = projected.permute(1, 2, 0, 3).unbind(0)
        out_HAK = torch.empty_like(q_HAK)
        out_HAK[:, :own] = F.scaled_dot_product_attention(
            q_HAK[:, :own], k_HAK, v_HAK, scale=self._scale
        )
        start, end = own, own + self._blocks.first_size
        while start < count:
            out_HAK[:, start:end] = F.scaled_dot_product_attention(
                q_HAK[:, start:end],
                torch.cat((k_HAK[:, :own], k_HAK[:, start:end]), 1),
                torch.cat((v_HAK[:, :own], v_HAK[:, start:end]), 1),
                scale=self._scale,
            )
            start, end = end, end + self._blocks.size
        return self._output(out_HAK.transpose(0, 1).flatten(1))
