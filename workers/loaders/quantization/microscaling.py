"""MXFP4: four-bit floats (E2M1) in groups of 32 that share a power of two; OCP Microscaling Formats, version 1.0.

The layout is that of the gpt-oss checkpoints, with D input and O output features. `blocks` uint8 [O, D / 32, 16] has an
even column in the low bits of a byte. `scales` uint8 [O, D / 32] are exponents with a bias of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import QuantizedMatrix
from .scheme import ColumnGroups, QuantizationScheme, StoredModule

GROUP_SIZE = 32
BITS, ZERO = 5, 16
"""Bits and offset of stored integers, which are twice the four-bit floats and thus from -12 to 12."""

E2M1_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]).to(torch.int8)
"""Twice the values of the sixteen four-bit floats, int8 [16]."""


def halves_of_powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 128) for exponents with a bias of 127, float32 in the same shape."""
    exponents = exponents.long()
    # The two lowest powers are subnormal floats.
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23)
    return bits.to(torch.int32).view(torch.float32)


def exponents_of_powers(powers: Tensor) -> Tensor:
    """Return the exponents, uint8 with a bias of 127, of powers of two in float32. NaN and infinity give 255."""
    bits = powers.contiguous().view(torch.int32)
    return (bits >> 23 & 255).to(torch.uint8)


class MXFP4Scheme(QuantizationScheme):
    """The scheme of MXFP4 weights in gpt-oss's layout."""

    marker = "blocks"
    marker_dtypes = frozenset({"U8"})
    companions = frozenset({"scales"})

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        found = module.shape("blocks")
        if found is None or len(found) != 3:
            raise module.problem(f"the tensor '{module.name}.blocks' does not have 3 dimensions")
        return found[0], found[1] * GROUP_SIZE

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        groups = ColumnGroups.from_part(columns, GROUP_SIZE, num_columns)
        stored = (num_rows, num_columns // GROUP_SIZE)
        blocks = module.read("blocks", (*stored, GROUP_SIZE // 2), rows, groups.stored)
        scales = module.read("scales", stored, rows, groups.stored)
        nibbles_OD = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        first = columns.start - groups.stored.start * GROUP_SIZE
        values_OD = E2M1_TWICE[nibbles_OD[:, first : first + len(columns)].int()] + ZERO
        return QuantizedMatrix(
            values_OD.to(torch.uint8),
            BITS,
            groups.expand(halves_of_powers(scales).bfloat16()),
            groups.size,
            ZERO,
            minifloats="mxfp4",
        )
