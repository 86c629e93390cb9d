"""Convert matrices of other formats to rows of GGUF blocks, which the native CPU backend can pack.

Shapes: O rows, G groups of a row, B blocks of 32 neighboring columns of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ....protocol.checkpoint.gguf import GGMLQuantizationType
from .matrix import QuantizedMatrix
from .microscaling import E2M1_TWICE, ZERO, exponents_of_powers

_BLOCK = 32
_LARGEST_SCALE = torch.finfo(torch.float16).max / 16
"""Largest scale. The offset of a block, up to 16 times its scale, must fit into a float16 as well."""

_MINIFLOATS = {"mxfp4": GGMLQuantizationType.MXFP4, "nvfp4": GGMLQuantizationType.NVFP4}
_CODES = torch.zeros(32, dtype=torch.uint8)
"""The four-bit code for each value of minifloats."""
_CODES[E2M1_TWICE.long() + ZERO] = torch.where(E2M1_TWICE == 0, 0, torch.arange(16)).to(torch.uint8)


def block_type(matrix: QuantizedMatrix) -> GGMLQuantizationType | None:
    """Return the type that can store the matrix: its integers exactly, and its scales and offsets in float16.

    Return None if no type can.
    """
    if matrix.minifloats is not None:
        return _minifloat_type(matrix)
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
    """Return whether blocks can represent the largest scales of a matrix, and the offsets of its groups.

    Blocks of minifloats keep the scales of the matrix. In other blocks they are float16, in which very small ones
    become 0.
    """
    if matrix.minifloats is not None:
        return True
    scale_OG = matrix.scale_OG.float()
    return not bool((scale_OG.isfinite() & (scale_OG.abs() > _LARGEST_SCALE)).any())


def _minifloat_type(matrix: QuantizedMatrix) -> GGMLQuantizationType | None:
    """Return the block type for a matrix of minifloats, or None if its groups do not match the type."""
    assert matrix.minifloats is not None
    stored_as = _MINIFLOATS[matrix.minifloats]
    group_size = _BLOCK if stored_as is GGMLQuantizationType.MXFP4 else _BLOCK // 2
    is_whole = matrix.shape[1] % _BLOCK == 0 and matrix.column_order_D is None
    return stored_as if is_whole and matrix.group_size == group_size else None


def as_blocks(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Return the rows in the type that `block_type` names, uint8 [O, row bytes]."""
    stored_as = block_type(matrix)
    if stored_as in _MINIFLOATS.values():
        return _as_minifloat_blocks(matrix)
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


def _as_minifloat_blocks(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Return the rows in MXFP4 or NVFP4, uint8 [O, row bytes], with their scales unchanged."""
    codes_OGN = _CODES[matrix.values_OD.int()].unflatten(1, (-1, matrix.group_size))
    half = matrix.group_size // 2
    nibbles_OGH = codes_OGN[:, :, :half] | codes_OGN[:, :, half:] << 4
    twice_OG = matrix.scale_OG.float() * 2
    if matrix.minifloats == "mxfp4":
        scales_OG = exponents_of_powers(twice_OG)
        blocks = torch.cat((scales_OG.unsqueeze(2), nibbles_OGH), 2)
    else:
        scales_OG = (twice_OG / matrix.factor).to(torch.float8_e4m3fn).view(torch.uint8)
        if scales_OG.shape[1] % 4:
            # The last block of a row is half as long.
            scales_OG = pad(scales_OG, (0, 2))
            nibbles_OGH = pad(nibbles_OGH, (0, 0, 0, 2))
        # A block of 64 columns consists of four scales, then the codes for each scale.
        parts = scales_OG.unflatten(1, (-1, 4)), nibbles_OGH.unflatten(1, (-1, 4)).flatten(2)
        blocks = torch.cat(parts, 2)
    found: NDArray[np.uint8] = blocks.flatten(1).numpy()
    return found


def _of_blocks(matrix: QuantizedMatrix, x_OG: Tensor) -> Tensor:
    """Return the value of each block's group, as float16 bytes [O, B, 2]."""
    num_blocks = matrix.shape[1] // _BLOCK
    if x_OG.shape[1] == 1:
        x_OB = x_OG.expand(-1, num_blocks)
    else:
        x_OB = x_OG.repeat_interleave(matrix.group_size // _BLOCK, 1)[:, :num_blocks]
    # If rows have one block, its stride may be any number, with which torch cannot view it as bytes.
    return x_OB.half().flatten().view(torch.uint8).unflatten(0, (*x_OB.shape, 2))
