"""Packs the factors of LoRA adapters for a native program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..loaders.peft_adapter import LowRank
from ..models.lora import AdaptedRows, LoraAdapters
from ..models.weights import Rows
from .library import Adapter, LowRankFactor
from .weights import (
    ActivationKind,
    PackedWeight,
    WeightFormat,
    WeightMemory,
    pack_tensor,
)

_BLOCK_COLUMNS: Final = 32
_RANK_UNIT: Final = 16
"""Ranks are rounded up to a multiple of a column tile; see `csrc/linear/linear.h`."""


class AdapterTable:
    """The part that each adapter adds to a product. Its factors are padded to one rank.

    Attributes:
        entries: An `Adapter` for each adapter, by its number.
        rank: The rank of all factors.
    """

    def __init__(self, num_adapters: int, rank: int) -> None:
        self.entries = (Adapter * num_adapters)()
        self.rank = rank
        self._kept: list[PackedWeight | Tensor | None] = []

    def set_factors(self, number: int, down: PackedWeight, ups: list[Tensor | None]) -> None:
        """Set the factors of an adapter: the first of all parts together, the second of each part."""
        entry = self.entries[number]
        entry.down = ctypes.addressof(down)
        for part, up in enumerate(ups):
            if up is not None:
                entry.up[part] = LowRankFactor(up.data_ptr(), self.rank, up.dtype == torch.bfloat16)
        self._kept += [down, *ups]


class NativeAdapters:
    """Collects what the adapters change of each matrix that a program reads, and packs it for its products.

    Args:
        loras: The adapters.
        dtype: The dtype of the model's float weights. With float32, factors are float32 as well.
    """

    def __init__(self, loras: LoraAdapters, dtype: torch.dtype) -> None:
        self.loras = loras
        self._is_float32 = dtype == torch.float32
        self._memory = WeightMemory()
        self._changes: dict[int, dict[int, LowRank]] = {}

    def add_matrix(
        self, weight: PackedWeight, rows: Rows, num_columns: int, columns: range | None
    ) -> None:
        """Note what the adapters change of a matrix with these rows, or of a part of its columns."""
        module = AdaptedRows(rows.name, rows.total, rows.select_from_all)
        if changes := self.loras.changes(module, num_columns, columns):
            self._changes[ctypes.addressof(weight)] = changes

    def table(self, parts: Sequence[PackedWeight]) -> AdapterTable | None:
        """Return the adapters of the product with these matrices, or None if none changes it."""
        changes = [self._changes.pop(ctypes.addressof(part), {}) for part in parts]
        numbers = sorted({number for each in changes for number in each})
        if not numbers:
            return None
        ranks = [len(low.down_RI) for each in changes for low in each.values()]
        table = AdapterTable(self.loras.num_adapters, -(-max(ranks) // _RANK_UNIT) * _RANK_UNIT)
        for number in numbers:
            found = [each.get(number) for each in changes]
            down = self._pack_downs(parts[0], found, table.rank)
            ups = [self._pack_up(low, table.rank) for low in found]
            is_finite = all(up is None or bool(up.isfinite().all()) for up in ups)
            if down is None or not is_finite:
                raise self.loras.error(number, "it has numbers that are not finite, or too large")
            table.set_factors(number, down, ups)
        return table

    def _pack_downs(
        self, part: PackedWeight, found: list[LowRank | None], rank: int
    ) -> PackedWeight | None:
        """Return the first factors of all parts, in a format that takes the activations of the product."""
        downs = torch.zeros(len(found), rank, part.k)
        for down, low in zip(downs, found, strict=True):
            if low is not None:
                down[: len(low.down_RI)] = low.down_RI
        formats = {
            ActivationKind.INT8: WeightFormat.U8,
            ActivationKind.BF16: WeightFormat.BF16,
            ActivationKind.F32: WeightFormat.F32 if self._is_float32 else WeightFormat.F16,
        }
        return pack_tensor(formats[part.activation_kind], downs.flatten(0, 1), self._memory)

    def _pack_up(self, low: LowRank | None, rank: int) -> Tensor | None:
        """Return the second factor of a part as `LowRankFactor` in csrc/rows/kernels.h has it."""
        if low is None:
            return None
        num_blocks = -(-len(low.up_OR) // _BLOCK_COLUMNS)
        up = torch.zeros(num_blocks * _BLOCK_COLUMNS, rank)
        up[: len(low.up_OR), : low.up_OR.shape[1]] = low.up_OR
        blocks = up.view(num_blocks, _BLOCK_COLUMNS, rank).transpose(1, 2)
        if self._is_float32:
            return blocks.contiguous()
        # The halves of a word are columns of both halves of the block.
        words = blocks.view(num_blocks, rank, 2, _BLOCK_COLUMNS // 2).transpose(2, 3)
        return words.to(torch.bfloat16).contiguous()

    def finish(self) -> None:
        """Raise an error if an adapter changes a matrix that is not part of a product with adapters."""
        assert not self._changes
        self.loras.finish()
