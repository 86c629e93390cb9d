"""Round rows of activations to float8 (e4m3) with scales, inside the kernels that compute the rows.

Shapes: T tokens, D features, G groups of a row, C columns of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT8_MAX = tl.constexpr(448.0)
_PART_OF_A_ROW = 2048


class Float8Rows(NamedTuple):
    """Rows [T, D] in float8_e4m3fn and their scales, float32 [T, G], or None for scales of 1."""

    values_TD: Tensor
    scale_TG: Tensor | None


Rows = Tensor | Float8Rows


class Rounding(msgspec.Struct, frozen=True):
    """Rounding of activations to float8, with one scale per `group_size` columns, per row, or for all values.

    `group_size` is a power of two. Rows rounded with the one `input_scale` carry no scales, because the matrix has it.
    """

    group_size: int | None = None
    input_scale: float | None = None

    def __call__(self, x_TD: Tensor) -> Float8Rows:
        """Round rows to float8. Their last dimension must be contiguous."""
        num_columns = x_TD.shape[1]
        out = RowOutput.allocate(x_TD, num_columns, self)
        if len(x_TD):
            _round_kernel[out.grid](x_TD, x_TD.stride(0), *out.arguments, **out.constants)
        assert isinstance(out.rows, Float8Rows)
        return out.rows


@triton.jit
def store_row(
    y_GC,
    out_ptr,
    scale_ptr,
    input_scale,
    groups_G,
    columns_GC,
    num_columns,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Store float32 groups of this program's row, rounded according to `RowOutput`."""
    token = tl.program_id(0).to(tl.int64)
    mask_GC = columns_GC < num_columns
    if SCALES == "given":
        y_GC = tl.clamp(y_GC / input_scale, -FLOAT8_MAX, FLOAT8_MAX)
    elif SCALES == "found":
        # The scale must not be zero, even for a group of zeros.
        scale_G = tl.maximum(tl.max(tl.abs(y_GC), 1), 1e-10) / FLOAT8_MAX
        num_groups = tl.cdiv(num_columns, GROUP)
        tl.store(scale_ptr + token * num_groups + groups_G, scale_G, mask=groups_G < num_groups)
        y_GC = tl.clamp(y_GC / scale_G[:, None], -FLOAT8_MAX, FLOAT8_MAX)
    out_row = out_ptr + token * num_columns
    tl.store(out_row + columns_GC, y_GC.to(out_ptr.dtype.element_ty), mask=mask_GC)


class RowOutput:
    """The output memory and launch arguments of a kernel that computes rows.

    A program computes `NUM_GROUPS` groups of `GROUP` columns of one row. `arguments` are `store_row`'s out_ptr,
    scale_ptr, input_scale and num_columns.
    """

    def __init__(
        self, x_TD: Tensor, num_columns: int, rounding: Rounding | None, columns_at_once: int
    ) -> None:
        num_tokens = len(x_TD)
        scales, group_size = "none", columns_at_once
        scale_TG = None
        if rounding is not None and rounding.input_scale is not None:
            scales = "given"
        elif rounding is not None:
            scales = "found"
            group_size = rounding.group_size or triton.next_power_of_2(num_columns)
            shape = (num_tokens, triton.cdiv(num_columns, group_size))
            scale_TG = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
        num_groups = max(1, columns_at_once // group_size)
        dtype = x_TD.dtype if rounding is None else torch.float8_e4m3fn
        out_TD = torch.empty(num_tokens, num_columns, dtype=dtype, device=x_TD.device)
        self.rows: Rows = out_TD if rounding is None else Float8Rows(out_TD, scale_TG)
        self.grid = (num_tokens, triton.cdiv(num_columns, num_groups * group_size))
        input_scale = 1.0 if rounding is None else rounding.input_scale or 1.0
        self.arguments = (out_TD, scale_TG, input_scale, num_columns)
        self.constants = {
            "NUM_GROUPS": num_groups,
            "GROUP": group_size,
            "SCALES": scales,
            "num_warps": min(16, max(1, num_groups * group_size // 512)),
        }

    @classmethod
    def allocate(cls, x_TD: Tensor, num_columns: int, rounding: Rounding | None) -> RowOutput:
        """Allocate the output for programs that compute part of a row, or a whole row if all of it shares one scale."""
        row = triton.next_power_of_2(num_columns)
        return cls(x_TD, num_columns, rounding, min(row, _PART_OF_A_ROW))

    @classmethod
    def allocate_whole_rows(cls, x_TD: Tensor, rounding: Rounding | None) -> RowOutput:
        """Allocate the output for programs that compute whole rows."""
        num_columns = x_TD.shape[1]
        return cls(x_TD, num_columns, rounding, triton.next_power_of_2(num_columns))


@triton.jit
def _round_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    scale_ptr,
    input_scale,
    num_columns,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):
    groups_G = tl.program_id(1) * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    columns_GC = groups_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_row = x_ptr + tl.program_id(0).to(tl.int64) * x_stride
    x_GC = tl.load(x_row + columns_GC, mask=columns_GC < num_columns, other=0.0).to(tl.float32)
    store_row(
        x_GC, out_ptr, scale_ptr, input_scale, groups_G, columns_GC, num_columns, GROUP, SCALES
    )
