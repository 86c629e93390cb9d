"""The low-rank changes that LoRA adapters add to a product, by the number of the adapter of each row.

Shapes: T tokens of a step, R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Linear: TypeAlias = Callable[[Any], Tensor]

Factors: TypeAlias = tuple[Tensor, Tensor]
"""(down_RI, up_OR): the output for x_TI grows by `x @ down.T @ up.T`."""


class StepAdapters(Protocol):
    """The adapters of the tokens of a step."""

    @property
    def device_number_T(self) -> Tensor:
        """The number of each token's adapter or -1, int32 on the device."""

    def rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Return the number of each adapter of the step, and its rows."""


class LowRankChanges(Protocol):
    """The factors of all adapters for one product, whose outputs are those of several matrices in a row."""

    def pack(self, changes: Sequence[Factors | None]) -> Any:
        """Return an adapter's factors for each matrix in the format of `install`. This may run in another thread."""

    def install(self, number: int, packed: Any) -> None:
        """Give this number to an adapter; if `packed` is None, the adapter leaves the product alone."""

    def add(self, y_TO: Tensor, x_TI: Tensor, adapters: StepAdapters) -> None:
        """Add what the adapter of each row changes to the outputs `y_TO` for the inputs `x_TI`."""


class TorchLowRank:
    """Changes in torch: one adapter after the other, each with its own rows.

    Args:
        heights: The output features of each matrix.
        dtype: The dtype of the factors.
        linear: Makes the product with a matrix.
    """

    def __init__(
        self, heights: Sequence[int], dtype: torch.dtype, linear: Callable[[Tensor], Linear]
    ) -> None:
        self._heights = heights
        self._dtype = dtype
        self._linear = linear
        self._installed: dict[int, tuple[Linear, Linear]] = {}

    def pack(self, changes: Sequence[Factors | None]) -> tuple[Linear, Linear]:
        """Return the products with both factors. Each matrix has its own rows of the first."""
        downs = [each[0] for each in changes if each is not None]
        up_OR = torch.zeros(sum(self._heights), sum(map(len, downs)))
        row = column = 0
        for each, height in zip(changes, self._heights, strict=True):
            if each is not None:
                rank = each[1].shape[1]
                up_OR[row : row + height, column : column + rank] = each[1]
                column += rank
            row += height
        return (
            self._linear(torch.cat(downs).to(self._dtype)),
            self._linear(up_OR.to(self._dtype)),
        )

    def install(self, number: int, packed: tuple[Linear, Linear] | None) -> None:
        """Give this number to an adapter."""
        self._installed.pop(number, None)
        if packed is not None:
            self._installed[number] = packed

    def add(self, y_TO: Tensor, x_TI: Tensor, adapters: StepAdapters) -> None:
        """Add what the adapter of each row changes."""
        if not self._installed:
            return
        for number, rows_T in adapters.rows_by_adapter():
            if (change := self._installed.get(number)) is not None:
                down, up = change
                y_TO.index_add_(0, rows_T, up(down(x_TI[rows_T])))
