"""Norms over the queries of all heads together, and over the keys of all heads together.

Shapes: T tokens of a step, H query heads and G key heads of this shard, K elements of a head, E of all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.layers import LayerNorm, RMSNorm
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ..weights import WeightReader


def read_full_norm(spec: ModelSpec, weights: WeightReader, prefix: str, num_heads: int) -> RMSNorm:
    """Return the norm of the elements of all heads."""
    size = num_heads * spec.head_dim
    weight_E = weights.read_vector(f"{prefix}weight", size) + spec.norm_weight_offset
    if spec.norm_kind == "rms":
        return RMSNorm(weight_E, spec.norm_eps)
    bias_E = weights.read_vector(f"{prefix}bias", size) if spec.qk_norm_bias else None
    return LayerNorm(weight_E, spec.norm_eps, bias_E)


class FullNorm:
    """Norms over all query heads together, and over all key heads together, across ranks."""

    def __init__(
        self, spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard
    ) -> None:
        self._shard = shard
        self._spec = spec
        self._num_heads = (len(shard.heads(spec)), len(shard.kv_heads(spec)))
        self._q_norm, self._k_norm = (
            read_full_norm(spec, weights, f"{prefix}{name}.", heads)
            for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
        )

    def __call__(self, qk_THK: Tensor) -> Tensor:
        """Return this rank's queries and keys [T, H + G, K], normed over the heads of all ranks."""
        q_THK, k_TGK = qk_THK.split(self._num_heads, 1)
        q_THK = self._norm(self._q_norm, q_THK, self._spec.num_heads)
        k_TGK = self._norm(self._k_norm, k_TGK, self._spec.num_kv_heads)
        return torch.cat((q_THK, k_TGK), 1)

    def _norm(self, norm: RMSNorm, x_THK: Tensor, num_heads: int) -> Tensor:
        """Norm the heads of all ranks, and return this rank's heads."""
        tensor_parallel = self._shard.tensor_parallel
        # If several ranks share the same heads, count these only once.
        step = max(1, tensor_parallel.size // num_heads)
        all_THK = torch.cat(tuple(tensor_parallel.stack(x_THK)[::step]), 1)
        own = tensor_parallel.part(num_heads)
        return norm(all_THK.flatten(1)).view_as(all_THK)[:, own.start : own.stop]
