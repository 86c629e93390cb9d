"""The embedding and the output projection in torch, as changed by LoRA adapters.

Shapes: T rows, D hidden size, R rank, v this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.layers import LayerKernels
from ...loaders.peft_adapter import Change, Replacement
from .adapters import LoraAdapters, RowAdapters
from .matrices import EMBEDDING, HEAD, REPLACEABLE, AdaptedMatrix, AdaptedRows

RowChange: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps the outputs and inputs of some rows to the outputs with an adapter."""


class _Make(Protocol):
    def __call__(
        self, change: Change, kernels: LayerKernels, dtype: torch.dtype, bias_v: Tensor | None
    ) -> RowChange:
        """Return the function that applies a change to rows, with factors in `dtype`."""


class VocabularyChanges:
    """Changes the outputs of the embedding or of the output projection according to adapters."""

    def __init__(
        self,
        name: str,
        vocabulary: tuple[int, int],
        part: range,
        loras: LoraAdapters,
        make: _Make,
        bias_v: Tensor | None = None,
    ) -> None:
        size, width = vocabulary
        rows = AdaptedRows(name, size, lambda x: x[part.start : part.stop])
        self.parts: Sequence[AdaptedMatrix] = (AdaptedMatrix(rows, width, replaceable=REPLACEABLE),)
        self._loras = loras
        self._make = make
        self._bias_v = bias_v
        self._installed: dict[int, RowChange] = {}
        loras.add_product(self)

    def pack(self, changes: Sequence[Change | None]) -> RowChange:
        """Return the changes of an adapter in the form that `install` takes."""
        (change,) = changes
        assert change is not None
        return self._make(change, self._loras.kernels, self._loras.dtype, self._bias_v)

    def install(self, number: int, packed: RowChange | None) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this matrix."""
        self._installed.pop(number, None)
        if packed is not None:
            self._installed[number] = packed

    def apply(self, y: Tensor, x: Tensor, adapters: RowAdapters) -> None:
        """Change in place the outputs `y` that belong to the inputs `x`."""
        if self._installed:
            for number, rows_T in adapters.rows_by_adapter():
                if (change := self._installed.get(number)) is not None:
                    y[rows_T] = change(y[rows_T], x[rows_T])

    def apply_in_step(self, y: Tensor, x: Tensor) -> None:
        """Change in place the outputs for the tokens of the current step."""
        self.apply(y, x, self._loras.tokens)


def embedding_changes(
    vocabulary: tuple[int, int], part: range, loras: LoraAdapters | None
) -> VocabularyChanges | None:
    """Return the changes for the rows `part` of the embedding. Its inputs are counted from the first of these rows."""
    if loras is None or not loras.kernels.finds_rows:
        return None
    return VocabularyChanges(EMBEDDING, vocabulary, part, loras, _change_embedding)


def head_changes(
    vocabulary: tuple[int, int], part: range, loras: LoraAdapters | None, bias_v: Tensor | None
) -> VocabularyChanges | None:
    """Return the changes for the rows `part` of the output projection."""
    if loras is None or not loras.kernels.finds_rows:
        return None
    return VocabularyChanges(HEAD, vocabulary, part, loras, _change_head, bias_v)


def _change_embedding(
    change: Change, kernels: LayerKernels, dtype: torch.dtype, bias_v: Tensor | None
) -> RowChange:
    if isinstance(change, Replacement):
        weight_vD = change.weight.to(dtype)
        return lambda _, index_T: F.embedding(index_T, weight_vD)
    up_vR = change.up_OR.to(dtype)
    multiply = kernels.linear(change.down_RI.mT.contiguous().to(dtype))
    return lambda y_TD, index_T: y_TD + multiply(F.embedding(index_T, up_vR))


def _change_head(
    change: Change, kernels: LayerKernels, dtype: torch.dtype, bias_v: Tensor | None
) -> RowChange:
    if isinstance(change, Replacement):
        replaced = kernels.linear(change.weight.to(dtype), bias_v)
        return lambda _, x_TD: replaced(x_TD)
    down = kernels.linear(change.down_RI.to(dtype))
    bias_O = None if change.bias_O is None else change.bias_O.to(dtype)
    up = kernels.linear(change.up_OR.to(dtype), bias_O)
    return lambda y_Tv, x_TD: y_Tv + up(down(x_TD))
