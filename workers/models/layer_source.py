"""The arguments with which every layer and each of its parts are constructed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

from ..layers.layers import LayerKernels, Linear
from ..layers.parallel.parallel_layers import RowParallelLinear
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from .weights import Rows, WeightReader


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

    def read_linear(
        self,
        name: str,
        num_rows: int,
        num_columns: int,
        part: range | None = None,
        *,
        has_bias: bool = False,
    ) -> Linear:
        """Return the product with a module's matrix, or with the rows `part` of it."""
        name = self.prefix + name
        weight = self.weights.read_matrix(f"{name}.weight", num_rows, num_columns, part=part)
        bias = self.weights.read(f"{name}.bias", num_rows, part=part) if has_bias else None
        return self.kernels.linear(weight, bias)

    def read_rows(
        self,
        rows: Sequence[Rows],
        num_columns: int,
        *,
        has_biases: bool = False,
        is_adapted: bool = False,
    ) -> Linear:
        """Return the product with rows of several modules, whose names include the prefix.

        If `is_adapted`, LoRA adapters may change it.
        """
        weight = self.weights.read_matrix_rows(rows, num_columns)
        biases = self.weights.read_biases(rows) if has_biases else None
        product = self.kernels.linear(weight, biases)
        return self.weights.adapt_rows(product, rows, num_columns) if is_adapted else product

    def read_columns(
        self,
        name: str,
        num_rows: int,
        num_columns: int,
        part: range | Sequence[range],
        *,
        has_bias: bool = False,
        is_adapted: bool = False,
    ) -> RowParallelLinear:
        """Return the product with this rank's columns `part` of a module's matrix, summed over the ranks.

        If `is_adapted`, LoRA adapters may change it. The columns are then one range.
        """
        weights, name = self.weights, self.prefix + name
        parts = [part] if isinstance(part, range) else part
        adapt = None
        if is_adapted:
            (own,) = parts
            adapt = partial(
                weights.adapt_columns, name=name, rows=num_rows, columns=num_columns, part=own
            )
        return RowParallelLinear(
            weights.read_matrix_columns(f"{name}.weight", num_rows, num_columns, parts),
            weights.read(f"{name}.bias", num_rows) if has_bias else None,
            self.shard.tensor_parallel,
            self.kernels,
            adapt,
        )
