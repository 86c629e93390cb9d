"""The matrices of a decoder that LoRA adapters change.

Shapes: R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from ...loaders.peft_adapter import Change, LowRank, Replacement

EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
"""The names of the embedding and of the output projection."""

REPLACEABLE: Final = ("weight",)
"""The matrices among these that adapters may replace."""


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Some of the `total` rows of the module `name`, which `select` takes from all of them."""

    name: str
    total: int
    select: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """Rows of a module and the part `columns` of its `num_columns`, None for all: a part of a product.

    A vector has no columns. Adapters may replace the tensors `replaceable` of the module, "weight" and "bias".
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
        """Return the part of the change of the whole module that falls on this matrix."""
        if isinstance(change, Replacement):
            return Replacement(self.rows.select(change.weight), change.bias)
        down_RI, bias_O = change.down_RI, change.bias_O
        if self.columns is not None:
            down_RI = down_RI[:, self.columns.start : self.columns.stop]
            # The ranks' parts of the product are summed. One of them adds the bias.
            bias_O = None if self.columns.start else bias_O
        if bias_O is not None:
            bias_O = self.rows.select(bias_O[:, None])[:, 0].contiguous()
        return LowRank(down_RI.contiguous(), self.rows.select(change.up_OR), bias_O)


class AdaptedProduct(Protocol):
    """A product of several matrices, or a table, each of which adapters may change."""

    @property
    def parts(self) -> Sequence[AdaptedMatrix]:
        """The matrices."""

    def pack(self, changes: Sequence[Change | None]) -> Any:
        """Return the change of an adapter to each matrix, as `install` takes it.

        Numbers are finite. This may run in another thread while the product is in use.

        Raises:
            ValueError: A number is too large.
        """

    def install(self, number: int, packed: Any) -> None:
        """Give this number to an adapter; if `packed` is None, the adapter leaves the product alone."""
