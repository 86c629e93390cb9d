"""The low-rank changes that LoRA adapters add to a product, row by row according to each row's adapter.

Shapes: T tokens of a step, R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Linear: TypeAlias = Callable[[Any], Tensor]


class Factors(NamedTuple):
    """The factors of an adapter: the output for x_TI grows by `x @ down_RI.T @ up_OR.T`, and by `bias_O` if given."""

    down_RI: Tensor
    up_OR: Tensor
    bias_O: Tensor | None = None


class StepAdapters(Protocol):
    """The adapters of the tokens of a step. `RowAdapters` implements this protocol."""

    @property
    def device_number_T(self) -> Tensor:
        """The adapter number of each token, or -1, int32 on the device."""

    def rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Return each adapter number of the step, with the indices of its rows."""


class LowRankChanges(Protocol):
    """The factors of all adapters for one product, whose outputs are the concatenated outputs of several matrices."""

    def pack(self, changes: Sequence[Factors | None]) -> Any:
        """Return an adapter's factors for each matrix in the form that `install` takes. May run in another thread."""

    def install(self, number: int, packed: Any) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this product."""

    def add(self, y_TO: Tensor, x_TI: Tensor, adapters: StepAdapters) -> None:
        """Add the change of each row's adapter to the outputs `y_TO` for the inputs `x_TI`."""


class TorchLowRank:
    """Low-rank changes in torch, computed for one adapter after the other.

    Args:
        heights: The number of output features of each matrix.
        dtype: The dtype of the factors.
        linear: Returns the product with a matrix, and a bias or None.
    """

    def __init__(
        self,
        heights: Sequence[int],
        dtype: torch.dtype,
        linear: Callable[[Tensor, Tensor | None], Linear],
    ) -> None:
        self._heights = heights
        self._dtype = dtype
        self._linear = linear
        self._installed: dict[int, tuple[Linear, Linear]] = {}

    def pack(self, changes: Sequence[Factors | None]) -> tuple[Linear, Linear]:
        """Return the products with the first and the second factors of all matrices.

        Each matrix has its own ranks.
        """
        downs = [each.down_RI for each in changes if each is not None]
        up_OR = torch.zeros(sum(self._heights), sum(map(len, downs)))
        bias_O = torch.zeros(len(up_OR))
        row = column = 0
        for each, height in zip(changes, self._heights, strict=True):
            if each is not None:
                rank = each.up_OR.shape[1]
                up_OR[row : row + height, column : column + rank] = each.up_OR
                column += rank
                if each.bias_O is not None:
                    bias_O[row : row + height] = each.bias_O
            row += height
        has_bias = any(each is not None and each.bias_O is not None for each in changes)
        return (
            self._linear(torch.cat(downs).to(self._dtype), None),
            self._linear(up_OR.to(self._dtype), bias_O.to(self._dtype) if has_bias else None),
        )

    def install(self, number: int, packed: tuple[Linear, Linear] | None) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this product."""
        self._installed.pop(number, None)
        if packed is not None:
            self._installed[number] = packed

    def add(self, y_TO: Tensor, x_TI: Tensor, adapters: StepAdapters) -> None:
        """Add the change of each row's adapter to the outputs."""
        if not self._installed:
            return
        for number, rows_T in adapters.rows_by_adapter():
            if (change := self._installed.get(number)) is not None:
                down, up = change
                y_TO.index_add_(0, rows_T, up(down(x_TI[rows_T])))
