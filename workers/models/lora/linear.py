"""Torch products to which LoRA adapters add.

Shapes: T tokens of a step, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...layers.layers import Linear
from ...layers.low_rank import Factors, LowRankChanges
from ...loaders.peft_adapter import Change, LowRank
from .adapters import LoraAdapters
from .matrices import AdaptedMatrix


class AdaptedLinear:
    """The product `linear`, plus what adapters add to it. `parts` are its matrices in the base model."""

    def __init__(
        self,
        linear: Linear,
        parts: Sequence[AdaptedMatrix],
        changes: LowRankChanges,
        loras: LoraAdapters,
    ) -> None:
        self.parts = parts
        self._linear = linear
        self._changes = changes
        self._loras = loras

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the product [T, O], with the adapter of each row added."""
        y_TO = self._linear(x_TI)
        self._changes.add(y_TO, x_TI, self._loras)
        return y_TO

    def pack(self, changes: Sequence[Change | None]) -> Any:
        """Return the factors of an adapter in the form that `install` takes."""
        factors = [
            Factors(low.down_RI, low.up_OR, low.bias_O) if isinstance(low, LowRank) else None
            for low in changes
        ]
        return self._changes.pack(factors)

    def install(self, number: int, packed: Any) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this product."""
        self._changes.install(number, packed)


def adapt(
    linear: Linear,
    parts: Sequence[AdaptedMatrix],
    loras: LoraAdapters | None,
    device: torch.device,
) -> Linear:
    """Return a linear layer that adds each row's adapter to `linear`, or `linear` itself if LoRA is disabled."""
    if loras is None:
        return linear
    heights = [len(part.rows.select(torch.empty(part.rows.total, 0))) for part in parts]
    columns = parts[0].columns
    num_columns = parts[0].num_columns if columns is None else len(columns)
    assert num_columns is not None
    changes = loras.kernels.low_rank(
        heights, num_columns, loras.capacity, loras.max_rank, loras.dtype, device
    )
    product = AdaptedLinear(linear, parts, changes, loras)
    loras.add_product(product)
    return product
