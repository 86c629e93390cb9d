"""RMS norm, with the preceding addition and the rounding of the result, in one kernel.

Shapes: T tokens, D features, G groups of a row, C columns of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .float8 import Rounding, RowOutput, Rows, store_row


@triton.jit
def _norm_kernel(
    x_ptr,
    x_stride,
    block_ptr,
    block_stride,
    multiplier,
    weight_ptr,
    eps,
    out_ptr,
    scale_ptr,
    input_scale,
    num_columns,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Norm one token's row. Grid (T,).

    x and block are [T, D] with strides between tokens; block may be None. weight is float32 [D]. The other arguments
    are described at `store_row`.
    """
    token = tl.program_id(0).to(tl.int64)
    groups_G = tl.arange(0, NUM_GROUPS)
    columns_GC = groups_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask_GC = columns_GC < num_columns
    x_row = x_ptr + token * x_stride
    x_GC = tl.load(x_row + columns_GC, mask=mask_GC, other=0.0).to(tl.float32)
    if block_ptr is not None:
        block_row = block_ptr + token * block_stride
        block_GC = tl.load(block_row + columns_GC, mask=mask_GC, other=0.0).to(tl.float32)
        # Round the stream before the norm, as if addition and norm were separate kernels.
        stored_GC = (x_GC + block_GC * multiplier).to(x_ptr.dtype.element_ty)
        tl.store(x_row + columns_GC, stored_GC, mask=mask_GC)
        x_GC = stored_GC.to(tl.float32)
    mean_square = tl.sum(tl.sum(x_GC * x_GC, 1), 0) / num_columns
    weight_GC = tl.load(weight_ptr + columns_GC, mask=mask_GC, other=0.0)
    y_GC = x_GC * tl.rsqrt(mean_square + eps) * weight_GC
    store_row(
        y_GC, out_ptr, scale_ptr, input_scale, groups_G, columns_GC, num_columns, GROUP, SCALES
    )


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    block_TD: Tensor | None = None,
    multiplier: float = 1.0,
    rounding: Rounding | None = None,
) -> Rows:
    """Return the RMS norm of `x_TD`, computed in float32.

    If `block_TD` is given, `block_TD` * `multiplier` is first added to `x_TD` in place. `weight_D` is float32. The last
    dimension of all tensors must be contiguous.
    """
    out = RowOutput.allocate_whole_rows(x_TD, rounding)
    if len(x_TD):
        _norm_kernel[out.grid](
            x_TD,
            x_TD.stride(0),
            block_TD,
            0 if block_TD is None else block_TD.stride(0),
            multiplier,
            weight_D,
            eps,
            *out.arguments,
            **out.constants,
        )
    return out.rows
