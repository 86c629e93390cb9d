"""The gated activation of an MLP and the rounding of its result, in one kernel.

Shapes: T tokens, F features, G groups of a row, C columns of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .float8 import Rounding, RowOutput, Rows, store_row

GATED_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""The activations that the kernel computes."""


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    gate_up_stride,
    out_ptr,
    scale_ptr,
    input_scale,
    num_columns,
    ACTIVATION: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Compute some groups of one token's row. Grid (T, ceil(F / columns of a program)).

    gate_up is [T, 2 * F] with a stride between tokens. The other arguments are described at `store_row`.
    """
    groups_G = tl.program_id(1) * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    columns_GC = groups_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask_GC = columns_GC < num_columns
    gate_row = gate_up_ptr + tl.program_id(0).to(tl.int64) * gate_up_stride
    gate_GC = tl.load(gate_row + columns_GC, mask=mask_GC, other=0.0).to(tl.float32)
    up_GC = tl.load(gate_row + num_columns + columns_GC, mask=mask_GC, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        slope_GC = tl.sigmoid(gate_GC)
    elif ACTIVATION == "clamped_swiglu":
        gate_GC = tl.minimum(gate_GC, 7.0)
        up_GC = tl.minimum(tl.maximum(up_GC, -7.0), 7.0) + 1.0
        slope_GC = tl.sigmoid(1.702 * gate_GC)
    else:
        # sigmoid(2 z) equals (1 + tanh(z)) / 2.
        z_GC = 0.7978845608028654 * (gate_GC + 0.044715 * gate_GC * gate_GC * gate_GC)
        slope_GC = tl.sigmoid(2 * z_GC)
    y_GC = gate_GC * slope_GC * up_GC
    store_row(
        y_GC, out_ptr, scale_ptr, input_scale, groups_G, columns_GC, num_columns, GROUP, SCALES
    )


def gated_activation(name: str, gate_up_T2F: Tensor, rounding: Rounding | None = None) -> Rows:
    """Return activation(gate) * up [T, F] of a fused projection, computed in float32.

    `name` is one of `GATED_ACTIVATIONS`. The last dimension must be contiguous.
    """
    out = RowOutput.allocate(gate_up_T2F, gate_up_T2F.shape[1] // 2, rounding)
    if len(gate_up_T2F):
        _gated_kernel[out.grid](
            gate_up_T2F, gate_up_T2F.stride(0), *out.arguments, ACTIVATION=name, **out.constants
        )
    return out.rows
