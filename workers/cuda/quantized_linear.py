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
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..loaders.quantization.matrix import ActivationScheme, QuantizedMatrix
from .bit_planes import integers_to_floats, load_integers, pack_plane, planes_of
from .float8 import Float8Rows, Rounding, Rows
from .library_products import LibraryProduct, library_product

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


@dataclass(frozen=True, slots=True)
class _Tile:
    tokens: int
    num_warps: int
    num_stages: int


_TILES = (_Tile(16, 4, 4), _Tile(32, 4, 4), _Tile(64, 4, 3), _Tile(128, 8, 3))


@triton.jit
def _of_columns(
    row_ptrs_O,
    first,
    mask_O,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the groups' values for a tile's columns: float32 [BLOCK_O, 1], or [BLOCK_O, BLOCK_D] for several groups."""
    if GROUP >= BLOCK_D:
        # A column of a matrix would be loaded once for each element that a thread multiplies with it.
        values_O = tl.load(row_ptrs_O + first // GROUP, mask=mask_O, other=0)
        values = values_O.to(tl.float32)[:, None]
    else:
        NUM_GROUPS: tl.constexpr = BLOCK_D // GROUP
        groups = first // GROUP + tl.arange(0, NUM_GROUPS)[None, :]
        mask = mask_O[:, None] & (groups < num_groups)
        few = tl.load(row_ptrs_O[:, None] + groups, mask=mask, other=0)
        repeated = tl.broadcast_to(few.to(tl.float32)[:, :, None], (BLOCK_O, NUM_GROUPS, GROUP))
        values = repeated.reshape(BLOCK_O, BLOCK_D)
    return values


@triton.jit
def _finished(sum_OT, scale_ptr, x_scale_ptr, bias_ptr, rows_O, tokens_T, mask_O, mask_T):
    """Multiply by the scales that all columns share, and add the bias. Scales and bias may be None."""
    if scale_ptr is not None:
        scale_O = tl.load(scale_ptr + rows_O, mask=mask_O, other=0).to(tl.float32)
        sum_OT *= scale_O[:, None]
    if x_scale_ptr is not None:
        sum_OT *= tl.load(x_scale_ptr + tokens_T, mask=mask_T, other=0)[None, :]
    if bias_ptr is not None:
        sum_OT += tl.load(bias_ptr + rows_O, mask=mask_O, other=0).to(tl.float32)[:, None]
    return sum_OT


@triton.jit
def _tokens_of_expert(ends_ptr, num_experts, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the expert that this program computes, the first of its tokens, and the end of the expert's tokens.

    The programs of axis 1 are the blocks of BLOCK_T tokens of the first expert, then of the second, and so on. Programs
    that are left over get expert NUM_EXPERTS and no tokens.
    """
    experts_E = tl.arange(0, NUM_EXPERTS)
    mask_E = experts_E < num_experts
    ends_E = tl.load(ends_ptr + experts_E, mask=mask_E, other=0)
    starts_E = tl.load(ends_ptr + experts_E - 1, mask=mask_E & (experts_E > 0), other=0)
    blocks_E = tl.where(mask_E, (ends_E - starts_E + BLOCK_T - 1) // BLOCK_T, 0)
    until_E = tl.cumsum(blocks_E, 0)
    block = tl.program_id(1)
    expert = tl.sum((until_E <= block).to(tl.int32), 0)
    is_own_E = experts_E == expert
    before = tl.sum(tl.where(is_own_E, until_E - blocks_E, 0), 0)
    start = tl.sum(tl.where(is_own_E, starts_E, 0), 0)
    end = tl.sum(tl.where(is_own_E, ends_E, 0), 0)
    return expert, start + (block - before) * BLOCK_T, end


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr,
    x_stride,
    x_scale_ptr,
    low_ptr,
    low_stride,
    high_ptr,
    high_stride,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    num_groups,
    bias_ptr,
    out_ptr,
    out_stride,
    num_tokens,
    num_rows,
    num_columns,
    split_columns,
    ends_ptr,
    num_experts,
    one,
    NUM_EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply a block of tokens by a block of rows.

    With `ends_ptr`, the matrix has `num_rows` rows for each expert.
    """
    outputs_O = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    mask_O = outputs_O < num_rows
    rows_O = outputs_O
    first_token = tl.program_id(1) * BLOCK_T
    end_token = num_tokens
    if ends_ptr is not None:
        expert, first_token, end_token = _tokens_of_expert(
            ends_ptr, num_experts, NUM_EXPERTS, BLOCK_T
        )
        if expert >= num_experts:
            return
        rows_O += expert.to(tl.int64) * num_rows
    tokens_T = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)
    mask_T = tokens_T < end_token
    group_rows_O = rows_O * num_groups
    rows_O1, mask_O1 = rows_O[:, None], mask_O[:, None]
    tokens_1T, mask_1T = tokens_T[None, :], mask_T[None, :]
    begin, end = 0, num_columns
    if HAS_SPLITS:
        begin = tl.program_id(2) * split_columns
        end = tl.minimum(begin + split_columns, num_columns)
    total_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for split in range(begin, end, split_columns):
        sum_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for first in range(split, tl.minimum(split + split_columns, end), BLOCK_D):
            columns_1D = (first + tl.arange(0, BLOCK_D))[None, :]
            columns_D1 = (first + tl.arange(0, BLOCK_D))[:, None]
            x_DT = tl.load(
                x_ptr + tokens_1T * x_stride + columns_D1,
                mask=mask_1T & (columns_D1 < num_columns),
                other=0.0,
            )
            mask_OD = mask_O1 & (columns_1D < num_columns)
            low_row = low_ptr + rows_O1 * low_stride
            if BITS == 0:
                w_OD = tl.load(low_row + columns_1D, mask=mask_OD, other=0.0)
            else:
                high_row = low_row
                if HIGH_BITS:
                    high_row = high_ptr + rows_O1 * high_stride
                w_OD = integers_to_floats(
                    load_integers(low_row, high_row, columns_1D, mask_OD, BITS, HIGH_BITS)
                )
                if zero_ptr is not None:
                    w_OD -= _of_columns(
                        zero_ptr + group_rows_O, first, mask_O, num_groups, GROUP, BLOCK_O, BLOCK_D
                    )
                else:
                    w_OD -= ZERO
            if SCALED == "elements":
                w_OD = w_OD.to(tl.float32) * _of_columns(
                    scale_ptr + group_rows_O, first, mask_O, num_groups, GROUP, BLOCK_O, BLOCK_D
                )
                if offset_ptr is not None:
                    w_OD += _of_columns(
                        offset_ptr + group_rows_O,
                        first,
                        mask_O,
                        num_groups,
                        GROUP,
                        BLOCK_O,
                        BLOCK_D,
                    )
            part_OT = tl.dot(w_OD.to(x_DT.dtype), x_DT, input_precision="ieee")
            if SCALED == "groups":
                group = first // GROUP
                scale_O = tl.load(scale_ptr + group_rows_O + group, mask=mask_O, other=0)
                part_OT *= scale_O.to(tl.float32)[:, None]
                if x_scale_ptr is not None:
                    x_scale_ptrs_T = x_scale_ptr + tokens_T * num_groups + group
                    part_OT *= tl.load(x_scale_ptrs_T, mask=mask_T, other=0)[None, :]
            elif BITS or SCALED == "elements" or low_ptr.dtype != x_ptr.dtype:
                # The converted operand is in registers. Before CUDA 13.3 ptxas may reuse them while the product still
                # reads them, if the product overlaps with the next one (triton-lang/triton#9433). Using its sum here
                # prevents the overlap.
                part_OT *= one
            sum_OT += part_OT
        total_OT += sum_OT
    mask_OT = mask_O1 & mask_1T
    if HAS_SPLITS:
        out_row = out_ptr + (tl.program_id(2).to(tl.int64) * num_tokens + tokens_1T) * num_rows
        tl.store(out_row + outputs_O[:, None], total_OT, mask=mask_OT)
    else:
        y_OT = _finished(
            total_OT,
            scale_ptr if SCALED == "rows" else None,
            x_scale_ptr if SCALED == "rows" else None,
            bias_ptr,
            rows_O,
            tokens_T,
            mask_O,
            mask_T,
        )
        out_row = out_ptr + tokens_1T * out_stride
        tl.store(out_row + outputs_O[:, None], y_OT.to(out_ptr.dtype.element_ty), mask=mask_OT)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_splits_kernel(
    sums_ptr,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_tokens,
    num_rows,
    num_splits,
    BLOCK_O: tl.constexpr,
):
    rows_O = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    token_1 = tl.program_id(1).to(tl.int64) + tl.zeros((1,), tl.int64)
    token_11 = token_1[:, None]
    rows_O1 = rows_O[:, None]
    mask_O1 = rows_O1 < num_rows
    total_O1 = tl.zeros((BLOCK_O, 1), tl.float32)
    for split in range(num_splits):
        sums_row = sums_ptr + (split * num_tokens + token_11) * num_rows
        total_O1 += tl.load(sums_row + rows_O1, mask=mask_O1, other=0.0)
    y_O1 = _finished(
        total_O1, scale_ptr, x_scale_ptr, bias_ptr, rows_O, token_1, rows_O < num_rows, token_1 >= 0
    )
    out_row = out_ptr + token_11 * out_stride
    tl.store(out_row + rows_O1, y_O1.to(out_ptr.dtype.element_ty), mask=mask_O1)


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
        _linear_kernel[grid](
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
            BLOCK_T=tile.tokens,
            BLOCK_O=_BLOCK_ROWS,
            BLOCK_D=self._block_columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if has_splits:
            scales_rows = self._scaled == "rows"
            _add_splits_kernel[(triton.cdiv(self._num_rows, _ADDED_ROWS), num_tokens)](
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
