"""The sums of sines and cosines of rotary embeddings with `FourierSpec`.

Shapes: T tokens, H query heads and G key/value heads of this shard, F summed frequencies, R rotated dimensions, S sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.layers import LayerKernels
from ...layers.parallel.shard import ModelShard
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ..weights import WeightReader


class FourierSums:
    """Sums the cosines and the sines of frequencies with stored factors, for each query head and then each key head."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: RopeSpec,
        shard: ModelShard,
        weights: WeightReader,
        kernels: LayerKernels,
    ) -> None:
        assert rope.fourier is not None
        size, has_heads = rope.fourier.num_frequencies, rope.fourier.has_heads
        self._num_frequencies, self._num_ones = size, rope.rotary_dim // 2 - size
        self._head_of_row: Tensor | None = None
        shape: tuple[int, ...] = (size, size)
        own = slice(None)
        if has_heads:
            heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
            group = spec.num_heads // spec.num_kv_heads
            rows = [*(head // group for head in heads), *kv_heads]
            self._head_of_row = torch.tensor(rows, device=weights.device) - kv_heads.start
            shape, own = (spec.num_kv_heads, size, size), slice(kv_heads.start, kv_heads.stop)
        self._sum_cosines, self._sum_sines = (
            kernels.router_linear(
                weights.read_float32(f"rotary_emb.{name}_coef", *shape)[own].mT.reshape(-1, size)
            )
            for name in ("cos", "sin")
        )

    def __call__(self, cos_T1X: Tensor, sin_T1X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums for cosines and sines [T, 1, R/2]: [T, H + G, R/2], or [T, 1, R/2] if heads share them."""
        both = ((self._sum_cosines, cos_T1X), (self._sum_sines, sin_T1X))
        cos_TPX, sin_TPX = (
            self._by_row(multiply(x_T1X[:, 0, : self._num_frequencies])) for multiply, x_T1X in both
        )
        return cos_TPX, sin_TPX

    def _by_row(self, sums_TS: Tensor) -> Tensor:
        sums_TGF = sums_TS.unflatten(-1, (-1, self._num_frequencies))
        filled = F.pad(sums_TGF, (0, self._num_ones), value=1.0)
        return filled if self._head_of_row is None else filled[:, self._head_of_row]
