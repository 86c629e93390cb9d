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


@triton.jit
def halves_to_floats(bytes, zeros, dtype: tl.constexpr):
    """Return the low and the high four bits of each byte, minus `zeros`, in `dtype`.

    With bfloat16, instructions for two numbers convert four bytes at once: 128 plus an integer below 128 has the
    integer as its lowest bits, so a byte of 0x43 before those bits is enough.
    """
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, one, exponents;
            and.b32 low, $4, 0x0f0f0f0f;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0f0f0f0f;
            mov.b32 one, 0x3f803f80;
            mov.b32 exponents, 0x43434343;
            prmt.b32 $0, low, exponents, 0x4140;
            prmt.b32 $1, low, exponents, 0x4342;
            prmt.b32 $2, high, exponents, 0x4140;
            prmt.b32 $3, high, exponents, 0x4342;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $5;
            fma.rn.bf16x2 $3, $3, one, $6;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r",
            [bytes, (-128 - zeros).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = integers_to_floats((bytes & 15).to(tl.int32)) - zeros
        high = integers_to_floats((bytes >> 4).to(tl.int32)) - zeros
    return low.to(dtype), high.to(dtype)
