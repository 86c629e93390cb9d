"""Attention whose queries and values have factors that depend on the token and on its position (Moondream 3).

Shapes: T tokens of a step, D hidden size, N ranks, H query heads and G key/value heads of this shard, K head dimension,
E elements of the queries, keys and values of all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.errors import ConfigError
from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from .kind import Attend, AttentionKind


class ScaledAttention(AttentionKind):
    """Attention to values that are scaled, by queries that are scaled before their rotation.

    A head's factor is the tanh of a product of the queries, keys and values of all heads, plus 0.5 and the sigmoid of
    a stored number times the logarithm of the position, counted from 1.

    Raises:
        ConfigError: More ranks than key/value heads divide the layer.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, kernels = source
        if spec.num_kv_heads % shard.tensor_parallel.size:
            raise ConfigError(
                f"--tensor-parallel-size {shard.tensor_parallel.size}: it must divide {spec.num_kv_heads}, the number "
                "of key/value heads"
            )
        self._head_dim = spec.head_dim
        heads, kv_heads, size = shard.heads(spec), shard.kv_heads(spec), spec.head_dim
        self._counts = (len(heads), len(kv_heads), len(kv_heads))
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = [elements(part, size) for part in (heads, kv_heads, kv_heads)]
        rows = weights.rows(
            prefix, ["q_proj", "k_proj", "v_proj"], [count * size for count in counts], parts
        )
        self._qkv = source.read_rows(
            rows, spec.hidden_size, has_biases=spec.qkv_bias, is_adapted=True
        )
        total = sum(counts) * size
        of_queries = weights.read(f"{prefix}tau.wq", spec.num_heads, total, part=heads)
        # There may be more rows than heads of values.
        of_values = weights.read(f"{prefix}tau.wv", spec.num_heads, total, part=kv_heads)
        self._factors = kernels.linear(torch.cat((of_queries, of_values)), None)
        alpha_H = weights.read_vector(f"{prefix}tau.alpha", spec.num_heads)
        self._alpha_H = torch.cat([alpha_H[each.start : each.stop] for each in (heads, kv_heads)])
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            spec.num_heads * size,
            parts[0],
            has_bias=spec.attention_output_bias,
            is_adapted=True,
        )

    def _compute(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        qkv_THK = self._qkv(x_TD).unflatten(-1, (-1, self._head_dim))
        q_THK, k_TGK, v_TGK = qkv_THK.split(self._counts, 1)
        q_factors_TH, v_factors_TG = self._scales(qkv_THK, positions_T).split(self._counts[:2], 1)
        q_THK = (q_THK * q_factors_TH[..., None]).to(qkv_THK.dtype)
        v_TGK = (v_TGK * v_factors_TG[..., None]).to(qkv_THK.dtype)
        attended_THK = attend(torch.cat((q_THK, k_TGK), 1), v_TGK)
        return self._output(attended_THK.flatten(1))

    def _scales(self, qkv_THK: Tensor, positions_T: Tensor) -> Tensor:
        """Return the factors of this rank's queries and values, float32 [T, H + G]."""
        parts = zip(
            *(each.split(self._counts, 1) for each in self._tensor_parallel.stack(qkv_THK)),
            strict=True,
        )
        all_TE = torch.cat([x for part in parts for x in part], 1).flatten(1)
        of_token_TH = torch.tanh(self._factors(F.gelu(all_TE)).float())
        steps_T1 = (positions_T.float() + 1).log()[:, None]
        return of_token_TH + torch.sigmoid(self._alpha_H * steps_T1) + 0.5
