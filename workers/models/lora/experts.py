"""LoRA adapters for the experts of a mixture, in torch.

Shapes: A rows, ordered by expert, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...layers.low_rank import Factors, Linear, TorchLowRank
from ...loaders.peft_adapter import Change, LowRank
from .adapters import LoraAdapters
from .matrices import AdaptedMatrix

_Packed: TypeAlias = dict[int, tuple[Linear, Linear]]
"""The low-rank factors of an adapter, by the number of the expert in this rank."""


class ExpertChanges:
    """The changes that adapters make to grouped products.

    `matrices` lists each expert's matrices, whose outputs are concatenated.
    """

    def __init__(self, matrices: Sequence[Sequence[AdaptedMatrix]], loras: LoraAdapters) -> None:
        self.parts = [part for expert in matrices for part in expert]
        self._size = len(matrices[0])
        self._loras = loras
        heights = [len(part.rows.select(torch.empty(part.rows.total, 0))) for part in matrices[0]]
        self._factors = TorchLowRank(heights, loras.dtype, loras.kernels.linear)
        self._installed: dict[int, _Packed] = {}
        loras.add_product(self)

    def pack(self, changes: Sequence[Change | None]) -> _Packed:
        """Return the factors of an adapter in the form that `install` takes."""
        packed = {}
        for expert, start in enumerate(range(0, len(changes), self._size)):
            own = [
                Factors(low.down_RI, low.up_OR, low.bias_O) if isinstance(low, LowRank) else None
                for low in changes[start : start + self._size]
            ]
            if any(own):
                packed[expert] = self._factors.pack(own)
        return packed

    def install(self, number: int, packed: _Packed | None) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change these products."""
        self._installed.pop(number, None)
        if packed is not None:
            self._installed[number] = packed

    def add(self, y_AO: Tensor, x_AI: Tensor, expert_A: Tensor, token_A: Tensor) -> None:
        """Add to each row of `y_AO` what the adapter of the row's token changes in the row's expert."""
        if not self._installed:
            return
        number_A = torch.from_numpy(self._loras.tokens.number_T)[token_A]
        for number, packed in self._installed.items():
            is_own_A = number_A == number
            for expert in expert_A[is_own_A].unique().tolist():
                if (change := packed.get(expert)) is not None:
                    rows = (is_own_A & (expert_A == expert)).nonzero().flatten()
                    down, up = change
                    y_AO.index_add_(0, rows, up(down(x_AI[rows])))
