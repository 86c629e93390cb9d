"""Products with quantized matrices, without dequantizing them in memory.

One kernel supports all formats: it converts tiles of the stored matrix to numbers and multiplies them by the tokens.
The matrix is the left operand. Its tiles have at least 64 rows, so that few tokens waste little work. For few tokens,
the columns are split among programs, and another kernel sums the splits. For many tokens, one program sums all splits.
Where the columns are split, and thus the order of a sum, depends only on the matrix.

If both factors are float8, torch has faster products for many tokens, which may sum in another order
(`library_products.py`).

Shapes: T tokens, O output and D input features, G groups of a row, S splits of a row. For mixtures of experts: E
experts, C choices of a token, A choices of all tokens ordered by expert, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import torch
import triton
from torch import Tensor

from ..loaders.quantization.matrix import ActivationScheme, QuantizedMatrix
from .bit_planes import pack_plane, planes_of
from .float8 import Float8Rows, Rounding, Rows
from .library_products import LibraryProduct, library_product
from .quantized_kernels import add_splits_kernel, linear_kernel

_SMALLEST_GROUP = 16
_SMALLEST_FLOAT8_GROUP = 32
_WHOLE_ROW = 1 << 30
_BLOCK_ROWS, _BLOCK_COLUMNS = 64, 128
_SPLIT_TOKENS = 64
"""Number of tokens above which there are enough programs without splits."""

_PROGRAMS = 528
"""Target number of programs: four for each multiprocessor of an H100 or H200."""

_SHORTEST_SPLIT = 512
_ADDED_ROWS = 256


class _Tile(msgspec.Struct, frozen=True):
    tokens: int
    num_warps: int
    num_stages: int


_TILES = (_Tile(16, 4, 4), _Tile(32, 4, 4), _Tile(64, 4, 3), _Tile(128, 8, 3))


def kept_group_size(matrix: QuantizedMatrix) -> int:
    """Return how many columns share a scale in the kernel: all of them, or a power of two."""
    if matrix.scale_OG.shape[1] == 1:
        return matrix.shape[1]
    return matrix.group_size & -matrix.group_size


def can_keep(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernels support the matrix without dequantizing it."""
    smallest = _SMALLEST_GROUP
    if matrix.activations is ActivationScheme.GROUP:
        smallest = _SMALLEST_FLOAT8_GROUP
    return matrix.scale_OG.shape[1] == 1 or kept_group_size(matrix) >= smallest


class PackedMatrix:
    """A matrix in the kernel's layout, or the matrices of `num_experts` experts, stacked by rows."""

    def __init__(
        self, matrix: QuantizedMatrix, *, num_experts: int = 1, is_batch_invariant: bool = False
    ) -> None:
        self._num_experts = num_experts
        self._num_rows, self._num_columns = matrix.shape[0] // num_experts, matrix.shape[1]
        self._pack_values(matrix)
        self._set_groups(matrix)
        self._order_D = matrix.column_order_D
        self._block_columns = _BLOCK_COLUMNS
        self.rounding: Rounding | None = None
        if matrix.activations is not ActivationScheme.NONE:
            self.rounding = Rounding(None, matrix.input_scale)
            if matrix.activations is ActivationScheme.GROUP and self._num_groups > 1:
                self.rounding = Rounding(self._group_size)
                self._block_columns = min(_BLOCK_COLUMNS, self._group_size)
        # Scaling after the product costs less, and scaled elements need not be rounded.
        if self._offset_OG is not None:
            self._scaled = "elements"
        elif self._num_groups == 1:
            self._scaled = "rows"
        else:
            is_wide = self._group_size >= self._block_columns
            self._scaled = "groups" if is_wide else "elements"
        num_tiles = triton.cdiv(self._num_rows, _BLOCK_ROWS)
        columns = triton.cdiv(self._num_columns, max(1, _PROGRAMS // num_tiles))
        self._split_columns = max(
            _SHORTEST_SPLIT, triton.cdiv(columns, _BLOCK_COLUMNS) * _BLOCK_COLUMNS
        )
        self._num_splits = triton.cdiv(self._num_columns, self._split_columns)
        self._library: LibraryProduct | None = None
        if not is_batch_invariant and num_experts == 1 and matrix.column_order_D is None:
            self._library = library_product(self._low, self._scale_OG, self.rounding)

    def _pack_values(self, matrix: QuantizedMatrix) -> None:
        values_OD, bits = matrix.values_OD, matrix.bits
        self._bits, self._high_bits = (0, 0) if bits is None else planes_of(bits)
        self._high: Tensor | None = None
        if bits is None:
            self._low = values_OD.contiguous()
            return
        self._low = pack_plane(values_OD & ((1 << self._bits) - 1), self._bits)
        if self._high_bits:
            self._high = pack_plane(values_OD >> self._bits, self._high_bits)

    def _set_groups(self, matrix: QuantizedMatrix) -> None:
        self._group_size = size = kept_group_size(matrix)
        self._num_groups = triton.cdiv(self._num_columns, size)

        def regrouped(x_OG: Tensor) -> Tensor:
            repeated = x_OG.repeat_interleave(max(1, matrix.group_size // size), 1)
            return repeated[:, : self._num_groups].contiguous()

        self._scale_OG = regrouped(matrix.scale_OG)
        if matrix.input_scale is not None:
            self._scale_OG = self._scale_OG * matrix.input_scale
        zero = matrix.zero_OG
        self._zero = zero if isinstance(zero, int) else 0
        self._zero_OG = None if isinstance(zero, int) else regrouped(zero)
        self._offset_OG = None if matrix.offset_OG is None else regrouped(matrix.offset_OG)

    def multiply(
        self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor, ends_E: Tensor | None = None
    ) -> None:
        """Write x @ matrix.T + bias to `out_TO`. The last dimension of all tensors must be contiguous.

        With several experts, rows ends_E[e - 1] to ends_E[e] of x are multiplied by the matrix of expert e, `bias_O`
        has the biases of all experts, and rows from the last end on are not written.
        """
        x_TD, x_scale_TG = x
        if self._order_D is not None:
            x_TD = x_TD[:, self._order_D]
        num_tokens = len(x_TD)
        # Torch's products output only bfloat16.
        dtypes = {out_TO.dtype, out_TO.dtype if bias_O is None else bias_O.dtype}
        is_large = num_tokens > _TILES[-1].tokens
        fits_library = is_large and ends_E is None and dtypes == {torch.bfloat16}
        if self._library is not None and fits_library:
            self._library(x, bias_O, out_TO)
            return
        tokens_of_expert = triton.cdiv(num_tokens, self._num_experts)
        tile = next((t for t in _TILES if tokens_of_expert <= t.tokens), _TILES[-1])
        num_blocks = triton.cdiv(num_tokens, tile.tokens)
        if ends_E is not None:
            # The last block of each expert may be incomplete.
            num_blocks = min(num_tokens, num_blocks + self._num_experts - 1)
        has_splits = ends_E is None and self._num_splits > 1 and num_tokens <= _SPLIT_TOKENS
        num_splits = self._num_splits if has_splits else 1
        target = out_TO
        if has_splits:
            shape = (num_splits, num_tokens, self._num_rows)
            target = torch.empty(shape, dtype=torch.float32, device=out_TO.device)
        grid = (
            triton.cdiv(self._num_rows, _BLOCK_ROWS),
            num_blocks,
            num_splits,
        )
        linear_kernel[grid](
            x_TD,
            x_TD.stride(0),
            x_scale_TG,
            self._low,
            self._low.stride(0),
            self._high,
            0 if self._high is None else self._high.stride(0),
            self._scale_OG,
            self._zero_OG,
            self._offset_OG,
            self._num_groups,
            bias_O,
            target,
            out_TO.stride(0),
            num_tokens,
            self._num_rows,
            self._num_columns,
            self._split_columns,
            ends_E,
            self._num_experts,
            1.0,
            NUM_EXPERTS=triton.next_power_of_2(self._num_experts),
            BITS=self._bits,
            HIGH_BITS=self._high_bits,
            ZERO=self._zero,
            GROUP=_WHOLE_ROW if self._num_groups == 1 else self._group_size,
            SCALED=self._scaled,
            HAS_SPLITS=has_splits,
            IN_HALVES=(self._bits, self._high_bits) == (4, 0) and self._scaled != "elements",
            BLOCK_T=tile.tokens,
            BLOCK_O=_BLOCK_ROWS,
            BLOCK_D=self._block_columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if has_splits:
            scales_rows = self._scaled == "rows"
            add_splits_kernel[(triton.cdiv(self._num_rows, _ADDED_ROWS), num_tokens)](
                target,
                self._scale_OG if scales_rows else None,
                x_scale_TG if scales_rows else None,
                bias_O,
                out_TO,
                out_TO.stride(0),
                num_tokens,
                self._num_rows,
                num_splits,
                BLOCK_O=_ADDED_ROWS,
            )


class QuantizedLinear:
    """Computes x [T, D] -> x @ matrix.T + bias, in `dtype`, for matrices that together make up the rows.

    `can_keep` must accept every matrix. If all of them round their input in the same way, `rounding` describes it, and
    the input may be passed in rounded form.
    """

    def __init__(
        self,
        matrices: Sequence[QuantizedMatrix],
        bias_O: Tensor | None,
        dtype: torch.dtype,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        self._dtype = dtype
        self._bias_O = bias_O
        self._parts = [
            PackedMatrix(matrix, is_batch_invariant=is_batch_invariant) for matrix in matrices
        ]
        bounds = [0, *accumulate(matrix.shape[0] for matrix in matrices)]
        self._rows = [slice(*ends) for ends in pairwise(bounds)]
        self._num_rows = bounds[-1]
        roundings = {part.rounding for part in self._parts}
        self.rounding = roundings.pop() if len(roundings) == 1 else None

    def __call__(self, x: Rows) -> Tensor:
        """Return the product [T, O]."""
        if isinstance(x, Tensor) and self.rounding is not None:
            x = self.rounding(x)
        values_TD = x if isinstance(x, Tensor) else x.values_TD
        shape = (len(values_TD), self._num_rows)
        out_TO = torch.empty(shape, dtype=self._dtype, device=values_TD.device)
        if not len(values_TD):
            return out_TO
        for part, rows in zip(self._parts, self._rows, strict=True):
            bias_O = None if self._bias_O is None else self._bias_O[rows]
            own = x
            if isinstance(own, Tensor):
                own = Float8Rows(own, None) if part.rounding is None else part.rounding(own)
            part.multiply(own, bias_O, out_TO[:, rows])
        return out_TO
