"""Kernels for matrices of 4-bit integers, which `word_matrix.py` launches.

A word has eight integers of a row: bits 4 * j to 4 * j + 3 of word k belong to column 16 * j + k of a run of 128
columns. So the words that a thread loads are operands of a matrix instruction as they are: their lowest bits are the
operand for columns 0 to 15, and so on.

Shapes: T tokens, O output and D input features, G groups of a row, K words of a run (16), E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bit_planes import integers_to_floats
from .product_tiles import finish_tile, tokens_of_expert

WORDS_OF_RUN = tl.constexpr(16)
RUN_COLUMNS = tl.constexpr(128)
TILE_ROWS = tl.constexpr(64)
"""The words of these rows and one run are stored together."""


@triton.jit
def _operand(words_OK, j: tl.constexpr, zeros_O, dtype: tl.constexpr):
    return (integers_to_floats((words_OK >> (4 * j)) & 15) - zeros_O[:, None]).to(dtype)


@triton.jit
def _pair_offset(zeros_O):
    return (-128.0 - zeros_O).to(tl.bfloat16)[:, None]


@triton.jit
def _operands(words_OK, zeros_0, zeros_1, zeros_2, zeros_3, dtype: tl.constexpr):
    """Return the eight integers of each word as tensors [O, K] of `dtype`: two minus `zeros_0` [O], and so on.

    With bfloat16, one instruction converts two numbers: 128 plus an integer below 128 has the integer as its lowest
    bits, so the bits of 128 around them are enough.
    """
    if dtype == tl.bfloat16:
        operands = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, bits, one;
            mov.b32 one, 0x3f803f80;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            lop3.b32 $0, low, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, low, 4;
            lop3.b32 $1, bits, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, low, 8;
            lop3.b32 $2, bits, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, low, 12;
            lop3.b32 $3, bits, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $4, high, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, high, 4;
            lop3.b32 $5, bits, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, high, 8;
            lop3.b32 $6, bits, 0x000f000f, 0x43004300, 0xea;
            shr.u32 bits, high, 12;
            lop3.b32 $7, bits, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, $10;
            fma.rn.bf16x2 $1, $1, one, $10;
            fma.rn.bf16x2 $2, $2, one, $11;
            fma.rn.bf16x2 $3, $3, one, $11;
            fma.rn.bf16x2 $4, $4, one, $12;
            fma.rn.bf16x2 $5, $5, one, $12;
            fma.rn.bf16x2 $6, $6, one, $13;
            fma.rn.bf16x2 $7, $7, one, $13;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [
                words_OK,
                _pair_offset(zeros_0),
                _pair_offset(zeros_1),
                _pair_offset(zeros_2),
                _pair_offset(zeros_3),
            ],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        operands = (
            _operand(words_OK, 0, zeros_0, dtype),
            _operand(words_OK, 1, zeros_0, dtype),
            _operand(words_OK, 2, zeros_1, dtype),
            _operand(words_OK, 3, zeros_1, dtype),
            _operand(words_OK, 4, zeros_2, dtype),
            _operand(words_OK, 5, zeros_2, dtype),
            _operand(words_OK, 6, zeros_3, dtype),
            _operand(words_OK, 7, zeros_3, dtype),
        )
    return operands


@triton.jit
def _zeros_of(groups, HAS_OFFSETS: tl.constexpr):
    """Return the zeros, in float32: bfloat16 in the high halves, unless offsets are there."""
    if HAS_OFFSETS:
        zeros = groups.to(tl.float32) * 0.0
    else:
        zeros = (groups & -65536).to(tl.float32, bitcast=True)
    return zeros


@triton.jit
def _scales_of(groups, SCALE: tl.constexpr):
    """Return the scales, which are in the low halves, in float32."""
    if SCALE == "bfloat16":
        scales = (groups << 16).to(tl.float32, bitcast=True)
    else:
        scales = groups.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scales


@triton.jit
def _offsets_of(groups, SCALE: tl.constexpr):
    """Return the offsets, which are in the high halves and have the type of the scales, in float32."""
    return _scales_of(groups >> 16, SCALE)


@triton.jit
def _dot_pair(left, x_left, right, x_right, sum_OT):
    sum_OT = tl.dot(left, x_left, sum_OT, input_precision="ieee")
    return tl.dot(right, x_right, sum_OT, input_precision="ieee")


@triton.jit
def _add_scaled(sum_OT, part_OT, x_sum_OT, groups, SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """Add the part of a group. `x_sum_OT` is the sum of its tokens, in each row."""
    sum_OT += part_OT * _scales_of(groups, SCALE)[:, None]
    if HAS_OFFSETS:
        sum_OT += x_sum_OT * _offsets_of(groups, SCALE)[:, None]
    return sum_OT


@triton.jit
def _words_ptr(words_ptr, rows_O, num_runs):
    """Return pointers [O, K] to the words of these rows in the first run of columns."""
    tiles_O, in_tile_O = rows_O // TILE_ROWS, rows_O % TILE_ROWS
    first_O = tiles_O * num_runs * (TILE_ROWS * WORDS_OF_RUN) + in_tile_O * WORDS_OF_RUN
    return words_ptr + first_O[:, None] + tl.arange(0, WORDS_OF_RUN)[None, :]


@triton.jit
def _load_x(x_ptrs_KT, mask_1T, column, num_columns, HAS_WHOLE_RUNS: tl.constexpr):
    mask_KT = mask_1T
    if not HAS_WHOLE_RUNS:
        mask_KT = mask_1T & (column + tl.arange(0, WORDS_OF_RUN)[:, None] < num_columns)
    return tl.load(x_ptrs_KT + column, mask=mask_KT, other=0.0)


@triton.jit
def _sum_of_columns(
    x_ptrs_KT,
    mask_1T,
    words_ptrs_OK,
    group_ptrs_O,
    groups_stride,
    begin,
    end,
    num_columns,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_WHOLE_RUNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Return the product of the columns from `begin` to `end`, float32 [O, T]. Pointers belong to the first column."""
    dtype: tl.constexpr = x_ptrs_KT.dtype.element_ty
    zero_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    ones_OK = tl.full((BLOCK_O, WORDS_OF_RUN), 1.0, dtype)
    sum_OT = zero_OT
    for first in range(begin, end, RUN_COLUMNS):
        words_OK = tl.load(words_ptrs_OK + first // RUN_COLUMNS * (TILE_ROWS * WORDS_OF_RUN))
        run_ptrs_O = group_ptrs_O + first // GROUP * groups_stride
        groups_0 = tl.load(run_ptrs_O)
        groups_1, groups_2, groups_3 = groups_0, groups_0, groups_0
        if GROUP == 64:
            groups_2 = tl.load(run_ptrs_O + groups_stride)
            groups_3 = groups_2
        if GROUP == 32:
            groups_1 = tl.load(run_ptrs_O + groups_stride)
            groups_2 = tl.load(run_ptrs_O + 2 * groups_stride)
            groups_3 = tl.load(run_ptrs_O + 3 * groups_stride)
        w0, w1, w2, w3, w4, w5, w6, w7 = _operands(
            words_OK,
            _zeros_of(groups_0, HAS_OFFSETS),
            _zeros_of(groups_1, HAS_OFFSETS),
            _zeros_of(groups_2, HAS_OFFSETS),
            _zeros_of(groups_3, HAS_OFFSETS),
            dtype,
        )
        x0 = _load_x(x_ptrs_KT, mask_1T, first, num_columns, HAS_WHOLE_RUNS)
        x1 = _load_x(x_ptrs_KT, mask_1T, first + 16, num_columns, HAS_WHOLE_RUNS)
        x2 = _load_x(x_ptrs_KT, mask_1T, first + 32, num_columns, HAS_WHOLE_RUNS)
        x3 = _load_x(x_ptrs_KT, mask_1T, first + 48, num_columns, HAS_WHOLE_RUNS)
        x4 = _load_x(x_ptrs_KT, mask_1T, first + 64, num_columns, HAS_WHOLE_RUNS)
        x5 = _load_x(x_ptrs_KT, mask_1T, first + 80, num_columns, HAS_WHOLE_RUNS)
        x6 = _load_x(x_ptrs_KT, mask_1T, first + 96, num_columns, HAS_WHOLE_RUNS)
        x7 = _load_x(x_ptrs_KT, mask_1T, first + 112, num_columns, HAS_WHOLE_RUNS)
        part_OT = _dot_pair(w0, x0, w1, x1, zero_OT)
        x_sum_OT = zero_OT
        if HAS_OFFSETS:
            x_sum_OT = _dot_pair(ones_OK, x0, ones_OK, x1, x_sum_OT)
        if GROUP == 32:
            sum_OT = _add_scaled(sum_OT, part_OT, x_sum_OT, groups_0, SCALE, HAS_OFFSETS)
            part_OT, x_sum_OT = zero_OT, zero_OT
        part_OT = _dot_pair(w2, x2, w3, x3, part_OT)
        if HAS_OFFSETS:
            x_sum_OT = _dot_pair(ones_OK, x2, ones_OK, x3, x_sum_OT)
        if GROUP <= 64:
            sum_OT = _add_scaled(sum_OT, part_OT, x_sum_OT, groups_1, SCALE, HAS_OFFSETS)
            part_OT, x_sum_OT = zero_OT, zero_OT
        part_OT = _dot_pair(w4, x4, w5, x5, part_OT)
        if HAS_OFFSETS:
            x_sum_OT = _dot_pair(ones_OK, x4, ones_OK, x5, x_sum_OT)
        if GROUP == 32:
            sum_OT = _add_scaled(sum_OT, part_OT, x_sum_OT, groups_2, SCALE, HAS_OFFSETS)
            part_OT, x_sum_OT = zero_OT, zero_OT
        part_OT = _dot_pair(w6, x6, w7, x7, part_OT)
        if HAS_OFFSETS:
            x_sum_OT = _dot_pair(ones_OK, x6, ones_OK, x7, x_sum_OT)
        sum_OT = _add_scaled(sum_OT, part_OT, x_sum_OT, groups_3, SCALE, HAS_OFFSETS)
    return sum_OT


@triton.jit(do_not_specialize=["num_tokens"])
def words_kernel(
    x_ptr,
    x_stride,
    words_ptr,
    groups_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    sums_ptr,
    num_ended_ptr,
    num_tokens,
    num_rows,
    stored_rows,
    num_columns,
    split_columns,
    ends_ptr,
    num_experts,
    NUM_EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_WHOLE_RUNS: tl.constexpr,
    SUMS_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Multiply a block of tokens by a block of rows. Grid (O / BLOCK_O, blocks of tokens, splits of the columns).

    words is int32 [rows / 64, D / 128, 64, K]. groups is int32 [G, rows], with a scale and a zero, or with a scale and
    an offset if `HAS_OFFSETS`. Each expert has `stored_rows` of the rows. If `SUMS_SPLITS`, a program sums all splits
    of its rows, in the same order as several programs would.
    """
    outputs_O = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    mask_O = outputs_O < num_rows
    expert = tl.cast(0, tl.int64)
    first_token = tl.program_id(1) * BLOCK_T
    end_token = num_tokens
    if ends_ptr is not None:
        expert_of_program, first_token, end_token = tokens_of_expert(
            ends_ptr, num_experts, NUM_EXPERTS, BLOCK_T
        )
        if expert_of_program >= num_experts:
            return
        expert = expert_of_program.to(tl.int64)
    stored_O = expert * stored_rows + outputs_O
    tokens_T = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)
    mask_T = tokens_T < end_token
    mask_1T = mask_T[None, :]
    columns_K1 = tl.arange(0, WORDS_OF_RUN)[:, None]
    x_ptrs_KT = x_ptr + tokens_T[None, :] * x_stride + columns_K1
    words_ptrs_OK = _words_ptr(words_ptr, stored_O, tl.cdiv(num_columns, RUN_COLUMNS))
    groups_stride = num_experts * stored_rows
    first_split = tl.program_id(2) * split_columns
    sum_OT = _sum_of_columns(
        x_ptrs_KT,
        mask_1T,
        words_ptrs_OK,
        groups_ptr + stored_O,
        groups_stride,
        first_split,
        tl.minimum(first_split + split_columns, num_columns),
        num_columns,
        GROUP,
        SCALE,
        HAS_OFFSETS,
        HAS_WHOLE_RUNS,
        BLOCK_T,
        BLOCK_O,
    )
    if SUMS_SPLITS:
        for split in range(split_columns, num_columns, split_columns):
            sum_OT += _sum_of_columns(
                x_ptrs_KT,
                mask_1T,
                words_ptrs_OK,
                groups_ptr + stored_O,
                groups_stride,
                split,
                tl.minimum(split + split_columns, num_columns),
                num_columns,
                GROUP,
                SCALE,
                HAS_OFFSETS,
                HAS_WHOLE_RUNS,
                BLOCK_T,
                BLOCK_O,
            )
    finish_tile(
        sum_OT,
        None,
        None,
        bias_ptr,
        out_ptr,
        out_stride,
        sums_ptr,
        num_ended_ptr,
        outputs_O,
        expert * num_rows + outputs_O,
        tokens_T,
        mask_O,
        mask_T,
        num_tokens,
        num_rows,
    )


@triton.jit
def dequantize_words_kernel(
    words_ptr,
    groups_ptr,
    out_ptr,
    num_rows,
    stored_rows,
    num_columns,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Write the numbers [O, D] of a matrix. Grid (D / 128, O / 64)."""
    first = tl.program_id(0) * RUN_COLUMNS
    rows_O = (tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    words_ptrs_OK = _words_ptr(words_ptr, rows_O, tl.num_programs(0))
    words_OK = tl.load(words_ptrs_OK + tl.program_id(0) * (TILE_ROWS * WORDS_OF_RUN))
    columns_K = first + tl.arange(0, WORDS_OF_RUN)
    out_ptrs_OK = out_ptr + rows_O[:, None] * num_columns + columns_K[None, :]
    for j in tl.static_range(8):
        column = 16 * j
        groups_O = tl.load(groups_ptr + (first + column) // GROUP * stored_rows + rows_O)
        integers_OK = integers_to_floats((words_OK >> (4 * j)) & 15)
        integers_OK -= _zeros_of(groups_O, HAS_OFFSETS)[:, None]
        numbers_OK = integers_OK * _scales_of(groups_O, SCALE)[:, None]
        if HAS_OFFSETS:
            numbers_OK += _offsets_of(groups_O, SCALE)[:, None]
        mask_OK = (rows_O[:, None] < num_rows) & (columns_K[None, :] + column < num_columns)
        tl.store(out_ptrs_OK + column, numbers_OK.to(out_ptr.dtype.element_ty), mask=mask_OK)
