"""The kernels of products with quantized matrices, which `quantized_linear.py` launches.

Shapes: T tokens, O output and D input features, G groups of a row, S splits of a row, H bytes with two integers of 4
bits each, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bit_planes import RUN, halves_to_floats, integers_to_floats, load_integers


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
def _product_of_halves(
    x_ptrs_1T,
    mask_1T,
    low_ptrs_O1,
    low_stride,
    zero_ptrs_O,
    first,
    mask_O,
    num_columns,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the product of a tile of 4-bit integers, minus their zeros, and tokens: float32 [BLOCK_O, BLOCK_T].

    Each byte is loaded once. The columns of its two halves are multiplied one after the other.
    """
    bytes_H = tl.arange(0, BLOCK_D // 2)
    bytes_1H = (first // 2 + bytes_H)[None, :]
    packed_OH = tl.load(
        low_ptrs_O1 + bytes_1H, mask=mask_O[:, None] & (bytes_1H < low_stride), other=0
    )
    columns_H1 = (first + bytes_H // RUN * (2 * RUN) + bytes_H % RUN)[:, None]
    low_HT = tl.load(x_ptrs_1T + columns_H1, mask=mask_1T & (columns_H1 < num_columns), other=0.0)
    high_HT = tl.load(
        x_ptrs_1T + (columns_H1 + RUN), mask=mask_1T & (columns_H1 + RUN < num_columns), other=0.0
    )
    if zero_ptrs_O is not None:
        zeros_O = tl.load(zero_ptrs_O + first // GROUP, mask=mask_O, other=0)
        zeros_O1 = zeros_O.to(tl.float32)[:, None]
    else:
        zeros_O1 = tl.full((mask_O.shape[0], 1), ZERO, tl.float32)
    low_OH, high_OH = halves_to_floats(packed_OH, zeros_O1, low_HT.dtype)
    product_OT = tl.dot(low_OH, low_HT, input_precision="ieee")
    return tl.dot(high_OH, high_HT, product_OT, input_precision="ieee")


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
    IN_HALVES: tl.constexpr,
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
            if IN_HALVES:
                part_OT = _product_of_halves(
                    x_ptr + tokens_1T * x_stride,
                    mask_1T,
                    low_ptr + rows_O1 * low_stride,
                    low_stride,
                    None if zero_ptr is None else zero_ptr + group_rows_O,
                    first,
                    mask_O,
                    num_columns,
                    ZERO,
                    GROUP,
                    BLOCK_D,
                )
            else:
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
                            zero_ptr + group_rows_O,
                            first,
                            mask_O,
                            num_groups,
                            GROUP,
                            BLOCK_O,
                            BLOCK_D,
                        )
                    else:
                        w_OD -= ZERO
                if SCALED == "elements":
                    w_OD = w_OD.to(tl.float32) * _of_columns(
                        scale_ptr + group_rows_O,
                        first,
                        mask_O,
                        num_groups,
                        GROUP,
                        BLOCK_O,
                        BLOCK_D,
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
def add_splits_kernel(
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
    """Add the sums of the splits, float32 [S, T, O], multiply by scales and add the bias. Grid (O / BLOCK_O, T)."""
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
