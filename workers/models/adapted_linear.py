"""Products in torch to which LoRA adapters add.

Shapes: T tokens of a step, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers.layers import Linear
from ..layers.low_rank import LowRankChanges
from ..loaders.peft_adapter import LowRank
from .lora import AdaptedMatrix, LoraAdapters


class AdaptedLinear:
    """The product `linear` with the matrices `parts` of the base model, and what adapters change beside it."""

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

    def pack(self, changes: Sequence[LowRank | None]) -> Any:
        """Return what an adapter changes.

        Raises:
            ValueError: A number is not finite.
        """
        for low in changes:
            if low is not None and not (
                low.down_RI.isfinite().all() and low.up_OR.isfinite().all()
            ):
                raise ValueError
        return self._changes.pack(
            [None if low is None else (low.down_RI, low.up_OR) for low in changes]
        )

    def install(self, number: int, packed: Any) -> None:
        """Give this number to an adapter."""
        self._changes.install(number, packed)


def adapt(
    linear: Linear,
    parts: Sequence[AdaptedMatrix],
    loras: LoraAdapters | None,
    device: torch.device,
) -> Linear:
    """Return the product with the adapters added, if there are any."""
    if loras is None:
        return linear
    heights = [len(part.rows.select(torch.empty(part.rows.total, 0))) for part in parts]
    columns = parts[0].columns or range(parts[0].num_columns)
    changes = loras.kernels.low_rank(
        heights, len(columns), loras.capacity, loras.max_rank, loras.dtype, device
    )
    product = AdaptedLinear(linear, parts, changes, loras)
    loras.add_product(product)
    return product
