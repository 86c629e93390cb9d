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
    """The part of a product that one program computes, and how it does so."""

    tokens: int
    rows: int
    num_warps: int
    num_stages: int


class Launch(msgspec.Struct, frozen=True):
    """A launch of a kernel that multiplies tokens by a matrix.

    `sums` is memory for the sums of splits, float32 [splits, T, O], or None if there are none.
    """

    tile: Tile
    grid: tuple[int, int, int]
    x: Float8Rows
    bias_O: Tensor | None
    out_TO: Tensor
    sums: Tensor | None
    ends_E: Tensor | None


class QuantizedProduct(ABC):
    """Multiplies tokens by a matrix, or by the matrices of `num_experts` experts, stacked by rows."""

    tiles: ClassVar[tuple[Tile, ...]]
    """The tiles for increasing numbers of tokens."""

    invariant_tiles: ClassVar[tuple[Tile, ...]]
    """Tiles with which the result of a token does not depend on the number of tokens."""

    rounding: Rounding | None = None
    """How the kernel needs its input, if not in floats of 16 bits or more."""

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
        self.split_columns = max(_SHORTEST_SPLIT, triton.cdiv(columns, _RUN_COLUMNS) * _RUN_COLUMNS)
        self._num_splits = triton.cdiv(self.num_columns, self.split_columns)
        most_tiles = num_tiles * triton.cdiv(_SPLIT_TOKENS, self.tiles[-1].tokens)
        self.num_ended = torch.zeros(most_tiles, dtype=torch.int32, device=matrix.values_OD.device)

    @abstractmethod
    def launch(self, launch: Launch) -> None:
        """Multiply tokens by the matrix, or rows of tokens by the matrices of their experts."""

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
        self.launch(Launch(tile, grid, x, bias_O, out_TO, sums, ends_E))


def launch_arguments(product: QuantizedProduct, launch: Launch) -> dict[str, Any]:
    """Return the arguments that all kernels of products have."""
    x_TD = launch.x.values_TD
    return {
        "x_ptr": x_TD,
        "x_stride": x_TD.stride(0),
        "bias_ptr": launch.bias_O,
        "out_ptr": launch.out_TO,
        "out_stride": launch.out_TO.stride(0),
        "sums_ptr": launch.sums,
        "num_ended_ptr": product.num_ended,
        "num_tokens": len(x_TD),
        "num_rows": product.num_rows,
        "num_columns": product.num_columns,
        "split_columns": product.split_columns,
        "ends_ptr": launch.ends_E,
        "num_experts": product.num_experts,
        "NUM_EXPERTS": triton.next_power_of_2(product.num_experts),
        "BLOCK_T": launch.tile.tokens,
        "BLOCK_O": launch.tile.rows,
        "num_warps": launch.tile.num_warps,
        "num_stages": launch.tile.num_stages,
    }
