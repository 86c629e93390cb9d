"""Packs the factors of LoRA adapters for a native program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ..layers.spec import ModelSpec
from ..loaders.peft_adapter import Change, LowRank, Replacement
from ..models.lora.adapters import LoraAdapters
from ..models.lora.matrices import EMBEDDING, HEAD, REPLACEABLE, AdaptedMatrix, AdaptedRows
from ..models.weights import Rows
from .abi.structs import Adapter, LowRankFactor
from .packing import ActivationKind, PackedWeight, WeightFormat, WeightMemory, pack_tensor

_BLOCK_COLUMNS: Final = 32
_RANK_UNIT: Final = 16
"""Ranks are padded to a multiple of this, the size of a column tile; see `csrc/linear/linear.h`."""


class FactorFormat(IntEnum):
    """Storage formats of second factors; see `csrc/rows/kernels.h`."""

    F32 = 0
    BF16 = 1
    INT8 = 2


class PackedFactor(msgspec.Struct, frozen=True):
    """The second factor of an adapter for one matrix, in the layout of `LowRankFactor` in csrc/rows/kernels.h."""

    data: NDArray[np.uint8]
    rank: int
    format: FactorFormat
    bias: Tensor | None = None


class PackedChange(msgspec.Struct, frozen=True):
    """The change that an adapter makes to a product, packed for native code.

    It has the first factors of all matrices, and the second factor of each; or a matrix that replaces the product's.
    """

    down: PackedWeight | None = None
    ups: Sequence[PackedFactor | None] = ()
    whole: PackedWeight | None = None


class AdapterTable:
    """The change of each adapter to one product of packed matrices.

    Attributes:
        parts: The matrices of the product.
        entries: An `Adapter` struct per adapter number, which native code reads.
        rank: The highest rank of factors, padded.
    """

    def __init__(
        self, parts: Sequence[AdaptedMatrix], weight: PackedWeight, adapters: NativeAdapters
    ) -> None:
        self.parts = parts
        self.entries = (Adapter * adapters.loras.capacity)()
        self.rank = _padded(adapters.loras.max_rank)
        self._num_inputs = weight.k
        self._adapters = adapters
        formats = {
            ActivationKind.INT8: WeightFormat.U8,
            ActivationKind.BF16: WeightFormat.BF16_TILES,
            ActivationKind.F32: WeightFormat.F32 if adapters.is_float32 else WeightFormat.F16,
        }
        self._format = formats[weight.activation_kind]
        """A storage format for first factors that multiplies the same activations as the product."""
        # Integer formats have int8 activations, so that second factors in int8 add no larger errors.
        is_int8 = weight.activation_kind is ActivationKind.INT8
        self._factor_format = FactorFormat.INT8 if is_int8 else FactorFormat.BF16
        if adapters.is_float32:
            self._factor_format = FactorFormat.F32
        self._installed: dict[int, PackedChange | None] = {}

    def pack(self, changes: Sequence[Change | None]) -> PackedChange:
        """Return the factors of an adapter, padded to a common rank. Raise ValueError if a number is too large."""
        lows = [low if isinstance(low, LowRank) else None for low in changes]
        rank = _padded(max(len(low.down_RI) for low in lows if low is not None))
        downs = torch.zeros(len(lows), rank, self._num_inputs)
        for down, low in zip(downs, lows, strict=True):
            if low is not None:
                down[: len(low.down_RI)] = low.down_RI
        ups = [
            None if low is None else replace(self._pack_up(low.up_OR, rank), bias=low.bias_O)
            for low in lows
        ]
        return PackedChange(self._pack_matrix(self._format, downs.flatten(0, 1)), ups)

    def install(self, number: int, packed: PackedChange | None) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change this product."""
        entry = Adapter()
        if packed is not None and packed.whole is not None:
            entry.whole = ctypes.addressof(packed.whole)
        if packed is not None and packed.down is not None:
            entry.down = ctypes.addressof(packed.down)
            for part, up in enumerate(packed.ups):
                if up is not None:
                    bias = None if up.bias is None else up.bias.data_ptr()
                    entry.up[part] = LowRankFactor(up.data.ctypes.data, up.rank, up.format, bias)
        self.entries[number] = entry
        # The memory of the previous adapter with this number can be freed now.
        self._installed[number] = packed

    def _pack_matrix(self, weight_format: WeightFormat, matrix: Tensor) -> PackedWeight:
        weight = pack_tensor(weight_format, matrix, self._adapters.memory)
        if weight is None:
            raise ValueError
        return weight

    def _pack_up(self, up_OR: Tensor, rank: int) -> PackedFactor:
        """Return the second factor for one matrix."""
        num_blocks = -(-len(up_OR) // _BLOCK_COLUMNS)
        up = torch.zeros(num_blocks * _BLOCK_COLUMNS, rank)
        up[: len(up_OR), : up_OR.shape[1]] = up_OR
        if self._factor_format is FactorFormat.F32:
            blocks = up.view(num_blocks, _BLOCK_COLUMNS, rank).transpose(1, 2)
            return PackedFactor(self._store(blocks), rank, FactorFormat.F32)
        if self._factor_format is FactorFormat.BF16:
            words = _pairs(up.view(num_blocks, _BLOCK_COLUMNS, rank).transpose(1, 2))
            return PackedFactor(self._store(words), rank, FactorFormat.BF16)
        scale_O = (up.abs().amax(1) / 127).bfloat16()
        codes = (up / scale_O.float().clamp(min=torch.finfo().tiny)[:, None]).round()
        quads = codes.clamp(-127, 127).to(torch.int8).view(num_blocks, 2, -1, rank // 4, 4)
        quads = quads[..., [0, 2, 1, 3]]
        parts = (
            _pairs(scale_O.float().view(num_blocks, 1, _BLOCK_COLUMNS)).view(torch.uint8),
            quads.permute(0, 3, 1, 2, 4).contiguous().view(torch.uint8),
        )
        data = torch.cat([part.flatten(1) for part in parts], 1)
        return PackedFactor(self._store(data), rank, FactorFormat.INT8)

    def _store(self, data: Tensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor in the memory of the adapter that is being loaded."""
        source = data.contiguous().view(torch.uint8).flatten().numpy()
        stored = self._adapters.memory.allocate(len(source))
        stored[:] = source
        return stored


def _pairs(rows: Tensor) -> Tensor:
    """Return rows [blocks, rows, 32] as pairs of bf16, [blocks, rows, 16, 2]: columns i and i + 16 form pair i.

    Raises:
        ValueError: A number is too large.
    """
    words = rows.unflatten(2, (2, _BLOCK_COLUMNS // 2)).transpose(2, 3).to(torch.bfloat16)
    if not words.isfinite().all():
        raise ValueError
    return words.contiguous()


class HeadTable(AdapterTable):
    """The change of each adapter to the output projection: an addition or a replacement."""

    def pack(self, changes: Sequence[Change | None]) -> PackedChange:
        """Return the factors of an adapter, or the matrix that replaces the output projection."""
        (change,) = changes
        if isinstance(change, Replacement):
            is_bf16 = self._format is WeightFormat.BF16_TILES
            weight_format = WeightFormat.BF16 if is_bf16 else self._format
            return PackedChange(whole=self._pack_matrix(weight_format, change.weight.contiguous()))
        return super().pack(changes)


class EmbeddingTable(AdapterTable):
    """The change of each adapter to rows of the embedding: an addition or a replacement."""

    def pack(self, changes: Sequence[Change | None]) -> PackedChange:
        """Return the factors of an adapter, the first with a row per token, or the rows that replace the embedding."""
        (change,) = changes
        weight_format = WeightFormat.F32 if self._adapters.is_float32 else WeightFormat.BF16
        if isinstance(change, Replacement):
            return PackedChange(whole=self._pack_matrix(weight_format, change.weight.contiguous()))
        assert change is not None
        up_OR = change.up_OR
        rank = _padded(up_OR.shape[1])
        rows = torch.zeros(len(up_OR), rank)
        rows[:, : up_OR.shape[1]] = up_OR
        up = self._pack_up(change.down_RI.mT, rank)
        return PackedChange(self._pack_matrix(weight_format, rows), [up])


class NativeAdapters:
    """Finds the products of a program that LoRA adapters may change.

    Args:
        loras: The adapters.
        spec: The model.
        vocabulary: The part of the vocabulary whose rows of embedding and output projection are in the program.
        dtype: The dtype of the model's float weights. If it is float32, factors are float32 as well.

    Attributes:
        memory: Memory for the packed factors of the adapter that is being loaded.
    """

    def __init__(
        self, loras: LoraAdapters, spec: ModelSpec, vocabulary: range, dtype: torch.dtype
    ) -> None:
        self.loras = loras
        self._spec = spec
        self._vocabulary = vocabulary
        self.is_float32 = dtype == torch.float32
        self.memory = WeightMemory()
        self._matrices: dict[int, AdaptedMatrix] = {}
        loras.on_load = self._begin_load

    def add_matrix(
        self, weight: PackedWeight, rows: Rows, num_columns: int, columns: range | None
    ) -> None:
        """Record which rows and columns of a module a packed matrix consists of."""
        module = AdaptedRows(rows.name, rows.total, rows.select_from_all)
        self._matrices[ctypes.addressof(weight)] = AdaptedMatrix(module, num_columns, columns)

    def table(self, parts: Sequence[PackedWeight]) -> AdapterTable | None:
        """Return a table for the product with these matrices, or None if adapters cannot change it."""
        found = [self._matrices.get(ctypes.addressof(part)) for part in parts]
        matrices = [matrix for matrix in found if matrix is not None]
        if not matrices or len(matrices) < len(found):
            return None
        table = AdapterTable(matrices, parts[0], self)
        self.loras.add_product(table)
        return table

    def embedding_table(self, weight: PackedWeight) -> AdapterTable | None:
        """Return a table for the embedding, or None if adapters cannot change it."""
        spec = self._spec
        if spec.tells_segments:
            # The matrix has rows for both types of tokens, which adapters do not have.
            return None
        # If the type of a token is part of its row, an adapter cannot replace the rows.
        is_plain = not spec.num_token_types or bool(spec.num_positions)
        matrix = self._vocabulary_matrix(EMBEDDING, REPLACEABLE if is_plain else ())
        table = EmbeddingTable([matrix], weight, self)
        self.loras.add_product(table)
        return table

    def head_table(self, weight: PackedWeight) -> AdapterTable:
        """Return a table for the output projection."""
        table = HeadTable([self._vocabulary_matrix(HEAD, REPLACEABLE)], weight, self)
        self.loras.add_product(table)
        return table

    def _vocabulary_matrix(self, name: str, replaceable: Sequence[str]) -> AdaptedMatrix:
        part = self._vocabulary
        rows = AdaptedRows(name, self._spec.vocab_size, lambda x: x[part.start : part.stop])
        return AdaptedMatrix(rows, self._spec.hidden_size, replaceable=replaceable)

    def _begin_load(self) -> None:
        # Each adapter has its own memory, which is freed together with it.
        self.memory = WeightMemory()


def _padded(rank: int) -> int:
    return -(-rank // _RANK_UNIT) * _RANK_UNIT
