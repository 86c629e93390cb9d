"""Packs the factors of LoRA adapters for a native program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..loaders.peft_adapter import LowRank
from ..models.lora import AdaptedMatrix, AdaptedRows, LoraAdapters
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


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """The factors of an adapter for a product: the first of all matrices together, the second of each."""

    down: PackedWeight
    ups: list[Tensor | None]


class AdapterTable:
    """The matrices by which each adapter adds to a product of packed matrices.

    Attributes:
        parts: The matrices.
        entries: An `Adapter` for each adapter, by its number.
        rank: The highest rank of factors.
    """

    def __init__(
        self, parts: Sequence[AdaptedMatrix], weight: PackedWeight, adapters: NativeAdapters
    ) -> None:
        self.parts = parts
        self.entries = (Adapter * adapters.loras.capacity)()
        self.rank = _padded(adapters.loras.max_rank)
        self._activation_kind, self._num_inputs = weight.activation_kind, weight.k
        self._adapters = adapters
        self._installed: dict[int, PackedFactors | None] = {}

    def pack(self, changes: Sequence[LowRank | None]) -> PackedFactors:
        """Return the factors of an adapter, padded to one rank.

        Raises:
            ValueError: A number is not finite, or too large.
        """
        rank = _padded(max(len(low.down_RI) for low in changes if low is not None))
        down = self._pack_downs(changes, rank)
        ups = [None if low is None else self._pack_up(low, rank) for low in changes]
        if down is None or not all(up is None or bool(up.isfinite().all()) for up in ups):
            raise ValueError
        return PackedFactors(down, ups)

    def install(self, number: int, packed: PackedFactors | None) -> None:
        """Give this number to an adapter; if `packed` is None, the adapter leaves the product alone."""
        entry = Adapter()
        if packed is not None:
            entry.down = ctypes.addressof(packed.down)
            for part, up in enumerate(packed.ups):
                if up is not None:
                    rank = packed.down.n // len(packed.ups)
                    entry.up[part] = LowRankFactor(up.data_ptr(), rank, up.dtype == torch.bfloat16)
        self.entries[number] = entry
        # The memory of the adapter that had the number is free now.
        self._installed[number] = packed

    def _pack_downs(self, changes: Sequence[LowRank | None], rank: int) -> PackedWeight | None:
        """Return the first factors of all parts, in a format that takes the activations of the product."""
        downs = torch.zeros(len(changes), rank, self._num_inputs)
        for down, low in zip(downs, changes, strict=True):
            if low is not None:
                down[: len(low.down_RI)] = low.down_RI
        formats = {
            ActivationKind.INT8: WeightFormat.U8,
            ActivationKind.BF16: WeightFormat.BF16,
            ActivationKind.F32: WeightFormat.F32 if self._adapters.is_float32 else WeightFormat.F16,
        }
        weight_format = formats[self._activation_kind]
        return pack_tensor(weight_format, downs.flatten(0, 1), self._adapters.memory)

    def _pack_up(self, low: LowRank, rank: int) -> Tensor:
        """Return the second factor of a part as `LowRankFactor` in csrc/rows/kernels.h has it."""
        num_blocks = -(-len(low.up_OR) // _BLOCK_COLUMNS)
        up = torch.zeros(num_blocks * _BLOCK_COLUMNS, rank)
        up[: len(low.up_OR), : low.up_OR.shape[1]] = low.up_OR
        blocks = up.view(num_blocks, _BLOCK_COLUMNS, rank).transpose(1, 2)
        if self._adapters.is_float32:
            return blocks.contiguous()
        # The halves of a word are columns of both halves of the block.
        words = blocks.view(num_blocks, rank, 2, _BLOCK_COLUMNS // 2).transpose(2, 3)
        return words.to(torch.bfloat16).contiguous()


class NativeAdapters:
    """Finds the products of a program that adapters may change.

    Args:
        loras: The adapters.
        dtype: The dtype of the model's float weights. With float32, factors are float32 as well.

    Attributes:
        memory: Where the factors of the adapter that is being loaded are packed.
    """

    def __init__(self, loras: LoraAdapters, dtype: torch.dtype) -> None:
        self.loras = loras
        self.is_float32 = dtype == torch.float32
        self.memory = WeightMemory()
        self._matrices: dict[int, AdaptedMatrix] = {}
        loras.on_load = self._begin_load

    def add_matrix(
        self, weight: PackedWeight, rows: Rows, num_columns: int, columns: range | None
    ) -> None:
        """Record the rows, and the part of the columns, of the module that a matrix is."""
        module = AdaptedRows(rows.name, rows.total, rows.select_from_all)
        self._matrices[ctypes.addressof(weight)] = AdaptedMatrix(module, num_columns, columns)

    def table(self, parts: Sequence[PackedWeight]) -> AdapterTable | None:
        """Return the adapters of the product with these matrices, or None if they cannot change it."""
        found = [self._matrices.get(ctypes.addressof(part)) for part in parts]
        matrices = [matrix for matrix in found if matrix is not None]
        if not matrices or len(matrices) < len(found):
            return None
        table = AdapterTable(matrices, parts[0], self)
        self.loras.add_product(table)
        return table

    def _begin_load(self) -> None:
        # Its own memory is freed with the adapter.
        self.memory = WeightMemory()


def _padded(rank: int) -> int:
    return -(-rank // _RANK_UNIT) * _RANK_UNIT
