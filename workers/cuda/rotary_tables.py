"""The rotary tables of a step in one kernel.

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
    positions_ptr, inv_freq_ptr, factor, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute cos and sin [T, R] of one token. Grid (T,).

    positions is [T]. inv_freq is float32 [HALF], with HALF = R / 2.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angles = position * tl.load(inv_freq_ptr + dims, mask=mask, other=0.0)
    cos = (tl.cos(angles) * factor).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angles) * factor).to(sin_ptr.dtype.element_ty)
    row = token * (2 * HALF) + dims
    tl.store(cos_ptr + row, cos, mask=mask)
    tl.store(cos_ptr + row + HALF, cos, mask=mask)
    tl.store(sin_ptr + row, -sin, mask=mask)
    tl.store(sin_ptr + row + HALF, sin, mask=mask)


def rotary_tables(rope: RotaryEmbedding, positions_T: Tensor) -> RotaryTables:
    """Return the same as `rope.tables`."""
    half = len(rope.inv_freq)
    shape = (len(positions_T), 1, 2 * half)
    cos_T1R, sin_T1R = (
        torch.empty(shape, dtype=rope.dtype, device=positions_T.device) for _ in range(2)
    )
    if len(positions_T):
        _rotary_tables_kernel[(len(positions_T),)](
            positions_T,
            rope.inv_freq,
            rope.attention_factor,
            cos_T1R,
            sin_T1R,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )
    return RotaryTables(cos_T1R, sin_T1R)
