"""Kernels that multiply with quantized matrices of any number of bits; `plane_matrix.py` launches them.

Shapes: T tokens, O output and D input features, G groups of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bit_planes import integers_to_floats, load_integers
from .product_tiles import finish_tile, tokens_of_expert


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
def _load_tile(
    low_row_O1,
    high_row_O1,
    scale_row_O,
    zero_row_O,
    offset_row_O,
    first,
    mask_O,
    num_columns,
    num_groups,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load a tile [O, D], given pointers to the rows: integers minus their zeros, or floats, scaled if `IS_SCALED`."""
    columns_1D = (first + tl.arange(0, BLOCK_D))[None, :]
    mask_OD = mask_O[:, None] & (columns_1D < num_columns)
    if BITS == 0:
        w_OD = tl.load(low_row_O1 + columns_1D, mask=mask_OD, other=0.0)
    else:
        w_OD = integers_to_floats(
            load_integers(low_row_O1, high_row_O1, columns_1D, mask_OD, BITS, HIGH_BITS)
        )
        if zero_row_O is not None:
            w_OD -= _of_columns(zero_row_O, first, mask_O, num_groups, GROUP, BLOCK_O, BLOCK_D)
        else:
            w_OD -= ZERO
    if IS_SCALED:
        scale = _of_columns(scale_row_O, first, mask_O, num_groups, GROUP, BLOCK_O, BLOCK_D)
        w_OD = w_OD.to(tl.float32) * scale
        if offset_row_O is not None:
            w_OD += _of_columns(offset_row_O, first, mask_O, num_groups, GROUP, BLOCK_O, BLOCK_D)
    return w_OD


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
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
    sums_ptr,
    num_ended_ptr,
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
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply a block of tokens by a block of rows. Grid (O / BLOCK_O, blocks of tokens, splits of the columns).

    With `ends_ptr`, the matrix has `num_rows` rows for each expert.
    """
    outputs_O = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    mask_O = outputs_O < num_rows
    rows_O = outputs_O
    first_token = tl.program_id(1) * BLOCK_T
    end_token = num_tokens
    if ends_ptr is not None:
        expert, first_token, end_token = tokens_of_expert(
            ends_ptr, num_experts, NUM_EXPERTS, BLOCK_T
        )
        if expert >= num_experts:
            return
        rows_O += expert.to(tl.int64) * num_rows
    tokens_T = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)
    mask_T = tokens_T < end_token
    group_rows_O = rows_O * num_groups
    scale_row_O = scale_ptr + group_rows_O
    zero_row_O = None if zero_ptr is None else zero_ptr + group_rows_O
    offset_row_O = None if offset_ptr is None else offset_ptr + group_rows_O
    low_row_O1 = low_ptr + (rows_O * low_stride)[:, None]
    high_row_O1 = None if high_ptr is None else high_ptr + (rows_O * high_stride)[:, None]
    x_row_1T = x_ptr + (tokens_T * x_stride)[None, :]
    begin, end = 0, num_columns
    if sums_ptr is not None:
        begin = tl.program_id(2) * split_columns
        end = tl.minimum(begin + split_columns, num_columns)
    total_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for split in range(begin, end, split_columns):
        sum_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for first in range(split, tl.minimum(split + split_columns, end), BLOCK_D):
            columns_D1 = (first + tl.arange(0, BLOCK_D))[:, None]
            mask_DT = mask_T[None, :] & (columns_D1 < num_columns)
            x_DT = tl.load(x_row_1T + columns_D1, mask=mask_DT, other=0.0)
            w_OD = _load_tile(
                low_row_O1,
                high_row_O1,
                scale_row_O,
                zero_row_O,
                offset_row_O,
                first,
                mask_O,
                num_columns,
                num_groups,
                BITS,
                HIGH_BITS,
                ZERO,
                GROUP,
                SCALED == "elements",
                BLOCK_O,
                BLOCK_D,
            )
            part_OT = tl.dot(w_OD.to(x_DT.dtype), x_DT, input_precision="ieee")
            if SCALED == "groups":
                group = first // GROUP
                scale_O = tl.load(scale_row_O + group, mask=mask_O, other=0)
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
    finish_tile(
        total_OT,
        scale_ptr if SCALED == "rows" else None,
        x_scale_ptr if SCALED == "rows" else None,
        bias_ptr,
        out_ptr,
        out_stride,
        sums_ptr,
        num_ended_ptr,
        outputs_O,
        rows_O,
        tokens_T,
        mask_O,
        mask_T,
        num_tokens,
        num_rows,
    )


@triton.jit
def dequantize_kernel(
    low_ptr,
    low_stride,
    high_ptr,
    high_stride,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    num_groups,
    out_ptr,
    num_rows,
    num_columns,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the numbers [O, D] of a matrix. Grid (D / BLOCK_D, O / BLOCK_O)."""
    first = tl.program_id(0) * BLOCK_D
    rows_O = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    mask_O = rows_O < num_rows
    group_rows_O = rows_O * num_groups
    numbers_OD = _load_tile(
        low_ptr + (rows_O * low_stride)[:, None],
        None if high_ptr is None else high_ptr + (rows_O * high_stride)[:, None],
        scale_ptr + group_rows_O,
        None if zero_ptr is None else zero_ptr + group_rows_O,
        None if offset_ptr is None else offset_ptr + group_rows_O,
        first,
        mask_O,
        num_columns,
        num_groups,
        BITS,
        HIGH_BITS,
        ZERO,
        GROUP,
        True,
        BLOCK_O,
        BLOCK_D,
    )
    columns_D = first + tl.arange(0, BLOCK_D)
    mask_OD = mask_O[:, None] & (columns_D < num_columns)[None, :]
    out_ptrs_OD = out_ptr + (rows_O * num_columns)[:, None] + columns_D[None, :]
    tl.store(out_ptrs_OD, numbers_OD.to(out_ptr.dtype.element_ty), mask=mask_OD)
