"""The matrices of a decoder that LoRA adapters change.

Shapes: R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

import msgspec
from torch import Tensor

from ...loaders.peft_adapter import Change, LowRank, Replacement

EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
"""The module names of the embedding and of the output projection."""

REPLACEABLE: Final = ("weight",)
"""The tensors of these modules that adapters may replace completely."""


class AdaptedRows(msgspec.Struct, frozen=True):
    """Some rows of the module `name`. `select` picks them from a tensor with all `total` rows."""

    name: str
    total: int
    select: Callable[[Tensor], Tensor]


class AdaptedMatrix(msgspec.Struct, frozen=True):
    """The part of a module that one rank multiplies by: some rows, and of them the columns `columns`, or all if None.

    The module has `num_columns` columns; None for a vector. `replaceable` names the tensors, "weight" and "bias", that
    adapters may replace completely.
    """

    rows: AdaptedRows
    num_columns: int | None
    columns: range | None = None
    replaceable: Collection[str] = ()

    @property
    def shape(self) -> list[int]:
        """The shape of the whole module's weight."""
        return (
            [self.rows.total] if self.num_columns is None else [self.rows.total, self.num_columns]
        )

    def changed(self, change: Change) -> Change:
        """Return the part of an adapter's change to the whole module that concerns this matrix."""
        if isinstance(change, Replacement):
            return Replacement(self.rows.select(change.weight), change.bias)
        down_RI, bias_O = change.down_RI, change.bias_O
        if self.columns is not None:
            down_RI = down_RI[:, self.columns.start : self.columns.stop]
            # The ranks' products are summed, so only one of them adds the bias.
            bias_O = None if self.columns.start else bias_O
        if bias_O is not None:
            bias_O = self.rows.select(bias_O[:, None])[:, 0].contiguous()
        return LowRank(down_RI.contiguous(), self.rows.select(change.up_OR), bias_O)


def scale_rows(change: Change, factors_O: Tensor) -> Change:
    """Return a change of a module whose outputs are multiplied by `factors_O`, one for each or one for all."""
    bias_O = change.bias if isinstance(change, Replacement) else change.bias_O
    if bias_O is not None:
        bias_O = bias_O * factors_O
    if isinstance(change, Replacement):
        return Replacement(change.weight * factors_O[:, None], bias_O)
    return LowRank(change.down_RI, change.up_OR * factors_O[:, None], bias_O)


class AdaptedProduct(Protocol):
    """A table, or a product of one or more matrices, that adapters may change."""

    @property
    def parts(self) -> Sequence[AdaptedMatrix]:
        """The matrices, in the order of their outputs."""

    def pack(self, changes: Sequence[Change | None]) -> Any:
        """Return the changes that an adapter makes to the matrices, in the form that `install` takes.

        The numbers must be finite. May run in another thread while the product is in use.

        Raises:
            ValueError: A number is too large.
        """

    def install(self, number: int, packed: Any) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this product."""
