"""Integers of a few bits, packed for kernels.

A plane contains `bits` (1, 2, 4 or 8) bits of each element, in runs of 32 bytes for 32 * 8 / `bits` columns. The lowest
bits of byte i belong to column i of the run, the next bits to column 32 + i, and so on. Neighboring threads therefore
read neighboring bytes, and bits do not have to be rearranged.

Shapes: O rows, D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = tl.constexpr(32)


def pack_plane(values_OD: Tensor, bits: int) -> Tensor:
    """Pack uint8 values below 2 ** `bits`: uint8 [O, bytes], with zeros after the last column."""
    fields = 8 // bits
    span = RUN.value * fields
    padding = -values_OD.shape[1] % span
    if padding:
        values_OD = torch.nn.functional.pad(values_OD, (0, padding))
    packed = torch.zeros(
        len(values_OD), values_OD.shape[1] // fields, dtype=torch.uint8, device=values_OD.device
    )
    runs = packed.unflatten(1, (-1, RUN.value))
    values = values_OD.unflatten(1, (-1, fields, RUN.value))
    for field in range(fields):
        runs |= values[:, :, field] << (field * bits)
    return packed


def planes_of(bits: int) -> tuple[int, int]:
    """Return the numbers of bits in an element's low and high plane; 0 if there is no high plane."""
    return (bits, 0) if bits in (4, 8) else (4, bits - 4)


@triton.jit
def load_plane(row_ptr, columns, mask, BITS: tl.constexpr):
    """Load the bits of these columns for rows that begin at `row_ptr`, as int32."""
    FIELDS: tl.constexpr = 8 // BITS
    byte = (columns // (RUN * FIELDS)) * RUN + columns % RUN
    packed = tl.load(row_ptr + byte, mask=mask, other=0).to(tl.int32)
    return (packed >> ((columns // RUN) % FIELDS * BITS)) & ((1 << BITS) - 1)


@triton.jit
def load_integers(low_ptr, high_ptr, columns, mask, BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """Load elements with `BITS` bits in the low plane and, if not 0, `HIGH_BITS` in the high plane, as int32."""
    values = load_plane(low_ptr, columns, mask, BITS)
    if HIGH_BITS:
        values |= load_plane(high_ptr, columns, mask, HIGH_BITS) << BITS
    return values


@triton.jit
def integers_to_floats(values):
    """Convert integers in [0, 2 ** 23) to float32 by manipulating bits, because the conversion instruction is slow."""
    return (values | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
