"""Conversion of matrices of other formats to rows of GGUF blocks, which the native CPU backend packs.

Shapes: O rows, G groups of a row, B blocks of 32 neighboring columns of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.checkpoint.gguf import GGMLQuantizationType
from .matrix import QuantizedMatrix

_BLOCK = 32
_LARGEST_SCALE = torch.finfo(torch.float16).max / 16
"""The offset of a block, at most 16 times its scale, must be a float16 as well."""


def block_type(matrix: QuantizedMatrix) -> GGMLQuantizationType | None:
    """Return the type that can store the matrix: its integers exactly, its scales and offsets in float16.

    Return None if there is no such type.
    """
    has_one_group = matrix.scale_OG.shape[1] == 1
    if (
        matrix.column_order_D is not None
        or matrix.shape[1] % _BLOCK
        or not (has_one_group or matrix.group_size % _BLOCK == 0)
    ):
        return None
    zero = matrix.zero_OG if matrix.offset_OG is None else None
    if matrix.bits == 4:
        is_symmetric = isinstance(zero, int) and zero == 8
        return GGMLQuantizationType.Q4_0 if is_symmetric else GGMLQuantizationType.Q4_1
    if matrix.bits == 8 and isinstance(zero, int) and zero == 128:
        return GGMLQuantizationType.Q8_0
    if matrix.bits == 5 and isinstance(zero, int) and zero == 16:
        return GGMLQuantizationType.Q5_0
    return None


def fits_block_scales(matrix: QuantizedMatrix) -> bool:
    """Return whether float16 can hold the largest scales of a matrix and the offsets of its blocks.

    The scales of MXFP4 have the exponents of float32. Scales below those of float16 become 0.
    """
    scale_OG = matrix.scale_OG.float()
    return not bool((scale_OG.isfinite() & (scale_OG.abs() > _LARGEST_SCALE)).any())


def as_blocks(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Return the rows in the type that `block_type` names, uint8 [O, row bytes]."""
    stored_as = block_type(matrix)
    values_OBN = matrix.values_OD.unflatten(1, (-1, _BLOCK))
    scale_OG = matrix.scale_OG.float()
    parts = [_of_blocks(matrix, scale_OG)]
    if stored_as is GGMLQuantizationType.Q4_1:
        zero = matrix.zero_OG
        offset_OG = -scale_OG * (zero if isinstance(zero, int) else zero.float())
        if matrix.offset_OG is not None:
            offset_OG += matrix.offset_OG.float()
        parts.append(_of_blocks(matrix, offset_OG))
    if stored_as is GGMLQuantizationType.Q5_0:
        fifths = (values_OBN >> 4).int() << torch.arange(_BLOCK, dtype=torch.int32)
        parts.append(fifths.sum(2, dtype=torch.int32).unsqueeze(2).view(torch.uint8))
        values_OBN = values_OBN & 15
    if stored_as is GGMLQuantizationType.Q8_0:
        parts.append(values_OBN ^ 128)
    else:
        parts.append(values_OBN[:, :, :16] | values_OBN[:, :, 16:] << 4)
    blocks: NDArray[np.uint8] = torch.cat(parts, 2).flatten(1).numpy()
    return blocks


def _of_blocks(matrix: QuantizedMatrix, x_OG: Tensor) -> Tensor:
    """Return the values of each block's group in float16, as bytes [O, B, 2]."""
    num_blocks = matrix.shape[1] // _BLOCK
    if x_OG.shape[1] == 1:
        x_OB = x_OG.expand(-1, num_blocks)
    else:
        x_OB = x_OG.repeat_interleave(matrix.group_size // _BLOCK, 1)[:, :num_blocks]
    return x_OB.half().contiguous().view(torch.uint8).unflatten(1, (-1, 2))
