"""Rounding the rows of an activation to float8 (e4m3), with a scale of their own.

T tokens, D features, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT8_MAX = tl.constexpr(448.0)


class Float8Rows(NamedTuple):
    """Rows [T, D] in float8_e4m3fn, to be multiplied with their scales, float32 [T, G]; None stands for 1."""

    values_TD: Tensor
    scale_TG: Tensor | None


@triton.jit
def to_float8(x, scale):
    """Return x / scale in float8; what is too large becomes the largest number."""
    return tl.clamp(x / scale, -FLOAT8_MAX, FLOAT8_MAX).to(tl.float8e4nv)


@triton.jit
def float8_scale(x, axis: tl.constexpr):
    """Return the scale with which the largest of `x` along an axis becomes the largest number in float8."""
    # Of rows without any value but zero it is small, yet not zero.
    return tl.maximum(tl.max(tl.abs(x), axis), 1e-10) / FLOAT8_MAX


@triton.jit
def _quantize_kernel(
    x_ptr,
    x_stride,
    values_ptr,
    scale_ptr,
    input_scale,
    num_columns,
    group_size,
    BLOCK: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * group_size
    scale = input_scale
    if not IS_STATIC:
        largest = tl.full((BLOCK,), 0.0, tl.float32)
        for start in range(0, group_size, BLOCK):
            inside = start + tl.arange(0, BLOCK)
            mask = (inside < group_size) & (first + inside < num_columns)
            x = tl.load(x_ptr + token * x_stride + first + inside, mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        scale = float8_scale(largest, 0)
        tl.store(scale_ptr + token * tl.num_programs(1) + group, scale)
    for start in range(0, group_size, BLOCK):
        inside = start + tl.arange(0, BLOCK)
        mask = (inside < group_size) & (first + inside < num_columns)
        x = tl.load(x_ptr + token * x_stride + first + inside, mask=mask, other=0.0)
        y = to_float8(x.to(tl.float32), scale)
        tl.store(values_ptr + token * num_columns + first + inside, y, mask=mask)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds rows, with a scale for every `group_size` columns of each, or of each row, or all with `input_scale`.

    Of what is rounded with `input_scale` the rows have no scale: the matrix has it.
    """

    group_size: int | None = None
    input_scale: float | None = None

    def __call__(self, x_TD: Tensor) -> Float8Rows:
        num_tokens, num_columns = x_TD.shape
        group_size = self.group_size or num_columns
        num_groups = triton.cdiv(num_columns, group_size)
        values_TD = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=x_TD.device)
        scale_TG = None
        if self.input_scale is None:
            scale_TG = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x_TD.device)
        if num_tokens:
            _quantize_kernel[(num_tokens, num_groups)](
                x_TD,
                x_TD.stride(0),
                values_TD,
                scale_TG,
                self.input_scale or 1.0,
                num_columns,
                group_size,
                BLOCK=min(triton.next_power_of_2(group_size), 4096),
                IS_STATIC=self.input_scale is not None,
            )
        return Float8Rows(values_TD, scale_TG)
