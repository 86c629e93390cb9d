"""Matrices of 4-bit integers in words, as `word_kernels.py` reads them.

Shapes: O output and D input features, G groups of a row, E experts, R rows of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ...loaders.quantization.matrix import ActivationScheme, QuantizedMatrix
from .product import QuantizedProduct, Tile
from .word_kernels import (
    RUN_COLUMNS,
    TILE_ROWS,
    WORDS_OF_RUN,
    dequantize_words_kernel,
    words_kernel,
)

_GROUP_SIZES = (32, 64)
_LARGEST_TILE_ROWS = 128
_WHOLE_ROW = 1 << 30
_SCALES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_INTEGERS_OF_WORD = 8


class WordMatrix(QuantizedProduct):
    """A matrix of 4-bit integers that `supports_words` accepts, or the matrices of several experts."""

    # With two warps, Triton multiplies by the older matrix instructions, which few tokens suffice for.
    tiles = (
        Tile(16, 64, 2, 4),
        Tile(32, 128, 4, 4),
        Tile(64, 128, 4, 3),
    )
    invariant_tiles = (
        Tile(16, 128, 4, 4),
        Tile(32, 128, 4, 4),
        Tile(64, 128, 4, 3),
    )

    def __init__(
        self, matrix: QuantizedMatrix, *, num_experts: int = 1, is_batch_invariant: bool = False
    ) -> None:
        super().__init__(matrix, num_experts=num_experts, is_batch_invariant=is_batch_invariant)
        self._stored_rows = triton.cdiv(self.num_rows, _LARGEST_TILE_ROWS) * _LARGEST_TILE_ROWS
        num_runs = triton.cdiv(self.num_columns, RUN_COLUMNS.value)
        self._scale = _SCALES[matrix.scale_OG.dtype]
        self._words = _pack_words(self._padded(matrix.values_OD, num_runs * RUN_COLUMNS.value))
        self._has_offsets = matrix.offset_OG is not None
        high_OG = matrix.offset_OG
        if high_OG is None:
            # Zeros are integers of at most 8 bits.
            zero = matrix.zero_OG
            zero_OG = torch.full_like(matrix.scale_OG, zero) if isinstance(zero, int) else zero
            high_OG = zero_OG.bfloat16()
        groups_OG = high_OG.view(torch.int16).int() << 16
        groups_OG |= matrix.scale_OG.view(torch.int16).int() & 0xFFFF
        self._group_size = _WHOLE_ROW if groups_OG.shape[1] == 1 else matrix.group_size
        num_groups = triton.cdiv(num_runs * RUN_COLUMNS.value, self._group_size)
        self._groups_GO = self._padded(groups_OG, num_groups).T.contiguous()

    def _padded(self, x_OD: Tensor, num_columns: int) -> Tensor:
        """Return a matrix with zeros after the last column, and after the last row of each expert."""
        x_ERD = x_OD.unflatten(0, (self.num_experts, self.num_rows))
        padding = (0, num_columns - x_OD.shape[1], 0, self._stored_rows - self.num_rows)
        return F.pad(x_ERD, padding).flatten(0, 1)

    def launch(
        self, grid: tuple[int, int, int], x_scale_TG: Tensor | None, arguments: dict[str, Any]
    ) -> None:
        """Multiply tokens by the matrix."""
        has_splits = arguments["sums_ptr"] is not None
        if not has_splits and not self.is_batch_invariant:
            arguments["split_columns"] = self.num_columns
        words_kernel[grid](
            words_ptr=self._words,
            groups_ptr=self._groups_GO,
            stored_rows=self._stored_rows,
            GROUP=self._group_size,
            SCALE=self._scale,
            HAS_OFFSETS=self._has_offsets,
            HAS_WHOLE_RUNS=not self.num_columns % RUN_COLUMNS.value,
            SUMS_SPLITS=self.is_batch_invariant and not has_splits,
            **arguments,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [O, D] in floats."""
        shape = (self.num_rows, self.num_columns)
        numbers_OD = torch.empty(shape, dtype=dtype, device=self._words.device)
        grid = (
            triton.cdiv(self.num_columns, RUN_COLUMNS.value),
            triton.cdiv(self.num_rows, TILE_ROWS.value),
        )
        dequantize_words_kernel[grid](
            self._words,
            self._groups_GO,
            numbers_OD,
            self.num_rows,
            self._stored_rows,
            self.num_columns,
            GROUP=self._group_size,
            SCALE=self._scale,
            HAS_OFFSETS=self._has_offsets,
        )
        return numbers_OD


def supports_words(matrix: QuantizedMatrix) -> bool:
    """Return whether a matrix can be stored in words: 4 bits, and scales of 16 bits for 32, 64 or many columns."""
    size = matrix.group_size
    has_size = size in _GROUP_SIZES or matrix.scale_OG.shape[1] == 1 or not size % RUN_COLUMNS.value
    return (
        matrix.bits == 4
        and has_size
        and matrix.scale_OG.dtype in _SCALES
        and (matrix.offset_OG is None or _has_only_offsets(matrix))
        and matrix.activations is ActivationScheme.NONE
    )


def _has_only_offsets(matrix: QuantizedMatrix) -> bool:
    """Return whether a matrix has offsets, but no zeros, which would need the same bits."""
    offset_OG = matrix.offset_OG
    has_zeros = not isinstance(matrix.zero_OG, int) or matrix.zero_OG != 0
    return offset_OG is not None and offset_OG.dtype == matrix.scale_OG.dtype and not has_zeros


def _pack_words(values_OD: Tensor) -> Tensor:
    """Pack uint8 values below 16: int32 [O / 64, D / 128, 64, 16]."""
    num_words = WORDS_OF_RUN.value
    runs = values_OD.unflatten(1, (-1, _INTEGERS_OF_WORD, num_words))
    words = torch.zeros(*runs.shape[:2], num_words, dtype=torch.int32, device=values_OD.device)
    for i in range(_INTEGERS_OF_WORD):
        words |= runs[:, :, i].int() << (4 * i)
    return words.unflatten(0, (-1, TILE_ROWS.value)).transpose(1, 2).contiguous()
