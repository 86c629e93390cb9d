"""Parts that all kernels of products with quantized matrices share.

Shapes: T tokens, O output features, S splits of a row's columns, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tokens_of_expert(ends_ptr, num_experts, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
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


@triton.jit
def _store_product(
    y_OT,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    outputs_O,
    rows_O,
    tokens_T,
    mask_O,
    mask_T,
):
    if scale_ptr is not None:
        scale_O = tl.load(scale_ptr + rows_O, mask=mask_O, other=0).to(tl.float32)
        y_OT *= scale_O[:, None]
    if x_scale_ptr is not None:
        y_OT *= tl.load(x_scale_ptr + tokens_T, mask=mask_T, other=0)[None, :]
    if bias_ptr is not None:
        y_OT += tl.load(bias_ptr + rows_O, mask=mask_O, other=0).to(tl.float32)[:, None]
    out_ptrs_OT = out_ptr + tokens_T[None, :] * out_stride + outputs_O[:, None]
    tl.store(out_ptrs_OT, y_OT.to(out_ptr.dtype.element_ty), mask=mask_O[:, None] & mask_T[None, :])


@triton.jit
def finish_tile(
    sum_OT,
    scale_ptr,
    x_scale_ptr,
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
):
    """Multiply a tile by the scales that all columns share, add the bias and store it. Scales and bias may be None.

    With `sums_ptr`, float32 [S, T, O], the programs of axis 2 have the sums of different columns. The last one of them
    to end adds all up, in a fixed order. `num_ended_ptr`, int32 [tiles], has zeros before and afterwards.
    """
    is_last = True
    if sums_ptr is not None:
        mask_OT = mask_O[:, None] & mask_T[None, :]
        places_OT = tokens_T[None, :] * num_rows + outputs_O[:, None]
        num_sums = tl.cast(num_tokens, tl.int64) * num_rows
        tl.store(sums_ptr + tl.program_id(2) * num_sums + places_OT, sum_OT, mask=mask_OT)
        # All threads must have stored their part before one of them announces it.
        tl.debug_barrier()
        num_ended_ptr += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(num_ended_ptr, 1) == tl.num_programs(2) - 1
    if is_last:
        if sums_ptr is not None:
            tl.store(num_ended_ptr, 0)
            sum_OT = tl.zeros_like(sum_OT)
            for split in range(tl.num_programs(2)):
                # The L1 cache is not coherent.
                sum_OT += tl.load(
                    sums_ptr + split * num_sums + places_OT,
                    mask=mask_OT,
                    other=0.0,
                    cache_modifier=".cg",
                )
        _store_product(
            sum_OT,
            scale_ptr,
            x_scale_ptr,
            bias_ptr,
            out_ptr,
            out_stride,
            outputs_O,
            rows_O,
            tokens_T,
            mask_O,
            mask_T,
        )
