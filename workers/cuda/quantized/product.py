"""The part of products with quantized matrices that does not depend on how a matrix is stored.

The matrix is the left operand. Its tiles have at least 64 rows, so that few tokens waste little work. For few tokens,
the columns are split among programs. For more tokens, one program sums all splits. Where the columns are split, and
thus the order of a sum, depends only on the matrix. For many tokens, the matrix is dequantized and torch multiplies it,
unless results must not depend on the number of tokens.

Shapes: T tokens, O output and D input features, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec
import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ...loaders.quantization.matrix import QuantizedMatrix
from ..float8 import Float8Rows, Rounding

_ROWS = 64
"""Number of rows by which the splits are determined."""

_RUN_COLUMNS = 128
_SPLIT_TOKENS = 256
"""Number of tokens above which there are enough programs without splits."""

_PROGRAMS = 528
"""Target number of programs: four for each multiprocessor of an H100 or H200."""

_SHORTEST_SPLIT = 512
_MOST_TOKENS = 256
"""Number of tokens above which dequantizing the matrix costs less than it saves."""


class Tile(msgspec.Struct, frozen=True):
    """The sizes of the part of a product that one program computes, and its warps and pipeline stages."""

    tokens: int
    rows: int
    num_warps: int
    num_stages: int


class QuantizedProduct(ABC):
    """Multiplies tokens by a matrix, or by the matrices of `num_experts` experts, stacked by rows."""

    tiles: ClassVar[tuple[Tile, ...]]
    """The tiles for increasing numbers of tokens."""

    invariant_tiles: ClassVar[tuple[Tile, ...]]
    """Tiles with which the result of a token does not depend on the number of tokens."""

    rounding: Rounding | None = None
    """The form in which the kernel needs its input, if not floats of 16 bits or more."""

    def __init__(
        self, matrix: QuantizedMatrix, *, num_experts: int, is_batch_invariant: bool
    ) -> None:
        self.num_experts = num_experts
        self.num_rows, self.num_columns = matrix.shape[0] // num_experts, matrix.shape[1]
        self._tiles = self.invariant_tiles if is_batch_invariant else self.tiles
        self.is_batch_invariant = is_batch_invariant
        self._order_D = matrix.column_order_D
        num_tiles = triton.cdiv(self.num_rows, _ROWS)
        columns = triton.cdiv(self.num_columns, max(1, _PROGRAMS // num_tiles))
        self._split_columns = max(
            _SHORTEST_SPLIT, triton.cdiv(columns, _RUN_COLUMNS) * _RUN_COLUMNS
        )
        self._num_splits = triton.cdiv(self.num_columns, self._split_columns)
        most_tiles = num_tiles * triton.cdiv(_SPLIT_TOKENS, self.tiles[-1].tokens)
        self._num_ended = torch.zeros(most_tiles, dtype=torch.int32, device=matrix.values_OD.device)

    @abstractmethod
    def launch(
        self, grid: tuple[int, int, int], x_scale_TG: Tensor | None, arguments: dict[str, Any]
    ) -> None:
        """Multiply tokens by the matrix, or by the matrices of their experts.

        `arguments` are those that all kernels of products have. `sums_ptr` is memory for the sums of splits, or None if
        there are none.
        """

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [O, D] in floats, with the columns in their stored order."""

    def multiply(
        self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor, ends_E: Tensor | None = None
    ) -> None:
        """Write x @ matrix.T + bias to `out_TO`. The last dimension of all tensors must be contiguous.

        With several experts, rows ends_E[e - 1] to ends_E[e] of x are multiplied by the matrix of expert e, `bias_O`
        has the biases of all experts, and rows from the last end on are not written.
        """
        if self._order_D is not None:
            x = Float8Rows(x.values_TD[:, self._order_D], x.scale_TG)
        num_tokens = len(x.values_TD)
        dtypes = {x.values_TD.dtype, out_TO.dtype, out_TO.dtype if bias_O is None else bias_O.dtype}
        fits_torch = len(dtypes) == 1 and self.rounding is None and ends_E is None
        if num_tokens > _MOST_TOKENS and fits_torch and not self.is_batch_invariant:
            out_TO.copy_(F.linear(x.values_TD, self.dequantize(out_TO.dtype), bias_O))
            return
        tokens_of_expert = triton.cdiv(num_tokens, self.num_experts)
        if ends_E is not None:
            # Some experts have twice as many, and should still read their matrix only once.
            tokens_of_expert *= 2
        tile = next((t for t in self._tiles if tokens_of_expert <= t.tokens), self._tiles[-1])
        num_blocks = triton.cdiv(num_tokens, tile.tokens)
        if ends_E is not None:
            # The last block of each expert may be incomplete.
            num_blocks = min(num_tokens, num_blocks + self.num_experts - 1)
        has_splits = ends_E is None and self._num_splits > 1 and num_tokens <= _SPLIT_TOKENS
        num_splits = self._num_splits if has_splits else 1
        sums = None
        if has_splits:
            shape = (num_splits, num_tokens, self.num_rows)
            sums = torch.empty(shape, dtype=torch.float32, device=out_TO.device)
        grid = (triton.cdiv(self.num_rows, tile.rows), num_blocks, num_splits)
        arguments = {
            "x_ptr": x.values_TD,
            "x_stride": x.values_TD.stride(0),
            "bias_ptr": bias_O,
            "out_ptr": out_TO,
            "out_stride": out_TO.stride(0),
            "sums_ptr": sums,
            "num_ended_ptr": self._num_ended,
            "num_tokens": num_tokens,
            "num_rows": self.num_rows,
            "num_columns": self.num_columns,
            "split_columns": self._split_columns,
            "ends_ptr": ends_E,
            "num_experts": self.num_experts,
            "NUM_EXPERTS": triton.next_power_of_2(self.num_experts),
            "BLOCK_T": tile.tokens,
            "BLOCK_O": tile.rows,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        self.launch(grid, x.scale_TG, arguments)
