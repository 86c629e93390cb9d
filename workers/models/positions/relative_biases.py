"""Biases of attention scores that depend on the query and on the distance to the key; see `RelativeBiasSpec`.

Shapes: T tokens of a step, H query heads of this shard, R elements of a head's projection, E distances.
"""

from __future__ import annotations

from torch import Tensor

from ...layers.layer_spec import LayerSpec
from ...layers.layers import HeadBound
from ...layers.parallel.tensor_parallel import elements
from ...layers.spec import ModelSpec
from ...layers.specs.relative_biases import RelativeBiasSpec
from ..weights import Rows, WeightReader


class RelativeBiases:
    """The biases of one layer's attention. `rows` are those of the projection to `size` elements, H * R.

    The columns of `matrix_RE` belong to the distances from 0 on.
    """

    def __init__(
        self,
        spec: ModelSpec,
        biases: RelativeBiasSpec,
        layer: LayerSpec,
        weights: WeightReader,
        prefix: str,
        heads: range,
    ) -> None:
        self._rank = rank = biases.rank
        count = layer.window if isinstance(layer.window, int) else biases.max_distance
        part = elements(heads, rank)
        self.size = len(part)
        self.rows = Rows(f"{prefix}bias_proj", spec.num_heads * rank, part, has_bias=False)
        self.matrix_RE = weights.read(f"{prefix}distance_profiles", rank, count)
        self.bound: HeadBound | None = None
        if biases.bound:
            weight = weights.read_elements(f"{prefix}bias_norm.weight", spec.num_heads * rank)
            own_HR = weight.view(-1, rank)[heads.start : heads.stop]
            self.bound = HeadBound(own_HR, biases.bound)

    def of_queries(self, projected_TX: Tensor) -> Tensor:
        """Return the bias of each query head for each distance, [T, H, E]. The input is [T, H * R]."""
        projected_THR = projected_TX.unflatten(-1, (-1, self._rank))
        if self.bound is not None:
            projected_THR = self.bound(projected_THR)
        return projected_THR @ self.matrix_RE
