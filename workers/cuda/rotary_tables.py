"""The rotary tables (cosines and sines) of a step, in one kernel.

Shapes: T tokens, R rotated dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layers.rope import RotaryEmbedding, RotaryTables


@triton.jit
def _rotary_tables_kernel(
    positions_ptr,
    inv_freq_ptr,
    axes_ptr,
    factor,
    cos_ptr,
    sin_ptr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_AXES: tl.constexpr,
):
    """Compute cos and sin [T, R] for one token. Grid (T,).

    positions is [T], or [T, NUM_AXES] if that is not 0. inv_freq is float32 [HALF], with HALF = R / 2. axes is int32
    [HALF].
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HALF
    if NUM_AXES:
        axes = tl.load(axes_ptr + dims, mask=mask, other=0)
        position = tl.load(positions_ptr + token * NUM_AXES + axes).to(tl.float32)
    else:
        position = tl.load(positions_ptr + token).to(tl.float32)
    angles = position * tl.load(inv_freq_ptr + dims, mask=mask, other=0.0)
    cos = (tl.cos(angles) * factor).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angles) * factor).to(sin_ptr.dtype.element_ty)
    row = token * (2 * HALF) + dims
    tl.store(cos_ptr + row, cos, mask=mask)
    tl.store(cos_ptr + row + HALF, cos, mask=mask)
    tl.store(sin_ptr + row, -sin, mask=mask)
    tl.store(sin_ptr + row + HALF, sin, mask=mask)


def rotary_tables(rope: RotaryEmbedding, positions: Tensor) -> RotaryTables:
    """Return the same as `rope.tables`."""
    half = len(rope.inv_freq)
    shape = (len(positions), 1, 2 * half)
    cos_T1R, sin_T1R = (
        torch.empty(shape, dtype=rope.dtype, device=positions.device) for _ in range(2)
    )
    if len(positions):
        num_axes = positions.shape[1] if positions.ndim == 2 else 0
        _rotary_tables_kernel[(len(positions),)](
            positions,
            rope.inv_freq,
            rope.axes if num_axes else None,
            rope.attention_factor,
            cos_T1R,
            sin_T1R,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            NUM_AXES=num_axes,
            num_warps=1,
        )
    return RotaryTables(cos_T1R, sin_T1R)
