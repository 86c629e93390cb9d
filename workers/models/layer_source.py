"""The arguments with which every layer and each of its parts are constructed."""

from __future__ import annotations

from typing import NamedTuple, Self

from ..layers.layers import LayerKernels
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from .weights import WeightReader


class LayerSource(NamedTuple):
    """The description of the model, the weights whose names begin with `prefix`, this worker's shard, and kernels."""

    spec: ModelSpec
    weights: WeightReader
    prefix: str
    shard: ModelShard
    kernels: LayerKernels

    def at(self, name: str) -> Self:
        """Return the source of a part, whose weights have names that continue with `name`."""
        return self._replace(prefix=self.prefix + name)
