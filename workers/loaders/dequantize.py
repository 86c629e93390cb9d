"""Convert GGUF blocks to floating point.

An element of a quantized block is ``q * scale + offset``, where the elements of a group share ``scale`` and ``offset``.
A type's unpack function returns these three. All types share the arithmetic, in float32 and in the order of ggml's
reference, so results are equal to the last bit.

Shapes: R rows, B blocks, b bytes of a block, G groups of a block, N elements of a group, W = N / 8 words. Eight bytes
are processed at a time as one int64 word; no byte overflows into the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...protocol.checkpoint.gguf import BLOCK_SIZES
from ...protocol.checkpoint.gguf import GGMLQuantizationType as T
from .quantization.matrix import QuantizedMatrix

# From 32768 elements on, torch distributes work to threads, which costs more than an operation on data in the cache. So
# work is cut into smaller pieces. Before the conversion to floats, an operation handles four or more elements as one
# word.
_FLOAT_ELEMENTS = 32767
_CHUNK_ELEMENTS = 4 * _FLOAT_ELEMENTS

_EACH_BYTE = 0x0101010101010101
_BIT_K_OF_BYTE_K = 0x8040201008040201 - (1 << 64)

_Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""``q`` int8 or uint8 ``[B, G, N]``, ``scale`` and ``offset`` float32 ``[B, G, 1]``."""


def dequantize(raw_Rb: npt.NDArray[np.uint8], ggml_type: T, dtype: torch.dtype) -> Tensor:
    """Convert R rows of whole blocks, uint8 ``[R, row bytes]`` with any strides, to ``[R, columns]``.

    Raises KeyError for a type that is not in `DEQUANTIZABLE`.
    """
    unpack = DEQUANTIZABLE[ggml_type]
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    num_rows, row_bytes = raw_Rb.shape
    out = torch.empty(num_rows, row_bytes // block_bytes * block_size, dtype=dtype)
    out_blocks = out.view(-1, block_size)
    if raw_Rb.flags.c_contiguous:
        raw_Rb = raw_Rb.reshape(-1, block_bytes)
    blocks_per_row = raw_Rb.shape[1] // block_bytes
    step = max(1, _CHUNK_ELEMENTS // max(1, blocks_per_row * block_size))
    staging = torch.empty(step, raw_Rb.shape[1], dtype=torch.uint8)
    for start in range(0, len(raw_Rb), step):
        rows = raw_Rb[start : start + step]
        staged = staging[: len(rows)]
        staged.numpy()[:] = rows
        first = start * blocks_per_row
        unpack(staged.view(-1, block_bytes), out_blocks[first : first + len(rows) * blocks_per_row])
    return out


def unpack_matrix(raw_Rb: Tensor, ggml_type: T) -> QuantizedMatrix:
    """Return R rows of whole blocks, contiguous uint8 ``[R, row bytes]``, as a matrix of integers with scales.

    Scales and offsets are float16, for MXFP4 bfloat16. Types that scale their scales are rounded to that. Raises
    KeyError for a type that is not in `BLOCK_TYPES`.
    """
    block = BLOCK_TYPES[ggml_type]
    num_rows = len(raw_Rb)
    blocks_Bb = raw_Rb.view(-1, BLOCK_SIZES[ggml_type][1])
    q_BGN, scale_BG1, offset_BG1 = block.unpack(blocks_Bb)
    return QuantizedMatrix(
        q_BGN.reshape(num_rows, -1).view(torch.uint8) + block.zero,
        block.bits,
        scale_BG1.reshape(num_rows, -1).to(getattr(torch, block.scale_dtype)),
        q_BGN.shape[2],
        block.zero,
        None if offset_BG1 is None else offset_BG1.reshape(num_rows, -1).half(),
        minifloats=block.minifloats,
    )


def _stored_as(stored: str) -> Callable[[Tensor, Tensor], None]:
    def convert(blocks_Bb: Tensor, out_B1: Tensor) -> None:
        x_B1 = blocks_Bb.view(getattr(torch, stored))
        for start in range(0, len(x_B1), _FLOAT_ELEMENTS):
            part = slice(start, start + _FLOAT_ELEMENTS)
            # Convert by way of float32, because torch has no vector code between the two 16-bit types.
            out_B1[part] = x_B1[part].float()

    return convert


def _quantized(unpack: Callable[[Tensor], _Unpacked]) -> Callable[[Tensor, Tensor], None]:
    def convert(blocks_Bb: Tensor, out_BN: Tensor) -> None:
        q_BGN, scale_BG1, offset_BG1 = unpack(blocks_Bb)
        out_BGN = out_BN.view(q_BGN.shape)
        step = max(1, _FLOAT_ELEMENTS // out_BN.shape[1])
        for start in range(0, len(out_BN), step):
            part = slice(start, start + step)
            x_BGN = q_BGN[part].float().mul_(scale_BG1[part])
            if offset_BG1 is not None:
                x_BGN.add_(offset_BG1[part])
            out_BGN[part] = x_BGN

    return convert


def _half(blocks_Bb: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block, as float32 ``[B, 1]``."""
    return blocks_Bb.view(torch.float16)[:, at // 2 : at // 2 + 1].float()


def _words(packed: Tensor, *shape: int) -> Tensor:
    """Return bytes as int64 words of eight bytes, in the given shape (of words)."""
    pairs = packed.view(torch.int16).clone(memory_format=torch.contiguous_format)
    return pairs.view(torch.int64).view(shape)


def _fields(words: Tensor, bits: int) -> Tensor:
    """Split the bytes of ``[B, n, W]`` into bit fields, lowest first: ``[B, n, 8 / bits, W]``."""
    fields = words.new_empty(*words.shape[:2], 8 // bits, words.shape[2])
    for i in range(8 // bits):
        torch.bitwise_and(words >> (i * bits), _EACH_BYTE * ((1 << bits) - 1), out=fields[:, :, i])
    return fields


def _minus(words: Tensor, amount: int) -> Tensor:
    """Subtract ``amount`` from every byte. Setting the top bits first keeps bytes from borrowing from each other."""
    lent = _EACH_BYTE * 0x80 - (1 << 64)
    return words.bitwise_or_(lent).sub_(_EACH_BYTE * amount).bitwise_xor_(lent)


def _fifth_bits(packed_B4: Tensor) -> Tensor:
    """Return the 32 bits in four bytes as 0 or 16 in 32 bytes, words ``[B, 1, 2, 2]``."""
    words = packed_B4.to(torch.int64).mul_(_EACH_BYTE).bitwise_and_(_BIT_K_OF_BYTE_K)
    # Adding 127 carries into the top bit of exactly the bytes that are not zero.
    is_set = words.add_(_EACH_BYTE * 0x7F) >> 3
    return is_set.bitwise_and_(_EACH_BYTE * 0x10).view(-1, 1, 2, 2)


def _q4_0(blocks_Bb: Tensor) -> _Unpacked:
    q = _minus(_fields(_words(blocks_Bb[:, 2:], -1, 1, 2), 4), 8)
    return q.view(torch.int8).view(-1, 1, 32), _half(blocks_Bb, 0).unsqueeze(2), None


def _q4_1(blocks_Bb: Tensor) -> _Unpacked:
    q = _fields(_words(blocks_Bb[:, 4:], -1, 1, 2), 4)
    scale, offset = _half(blocks_Bb, 0).unsqueeze(2), _half(blocks_Bb, 2).unsqueeze(2)
    return q.view(torch.uint8).view(-1, 1, 32), scale, offset


def _q5_0(blocks_Bb: Tensor) -> _Unpacked:
    q = _fields(_words(blocks_Bb[:, 6:], -1, 1, 2), 4)
    q = _minus(q.bitwise_or_(_fifth_bits(blocks_Bb[:, 2:6])), 16)
    return q.view(torch.int8).view(-1, 1, 32), _half(blocks_Bb, 0).unsqueeze(2), None


def _q5_1(blocks_Bb: Tensor) -> _Unpacked:
    q = _fields(_words(blocks_Bb[:, 8:], -1, 1, 2), 4)
    q.bitwise_or_(_fifth_bits(blocks_Bb[:, 4:8]))
    scale, offset = _half(blocks_Bb, 0).unsqueeze(2), _half(blocks_Bb, 2).unsqueeze(2)
    return q.view(torch.uint8).view(-1, 1, 32), scale, offset


def _q8_0(blocks_Bb: Tensor) -> _Unpacked:
    q = blocks_Bb[:, 2:].view(torch.int8).unsqueeze(1)
    return q, _half(blocks_Bb, 0).unsqueeze(2), None


def _q2_k(blocks_Bb: Tensor) -> _Unpacked:
    scales = blocks_Bb[:, :16]
    scale = _half(blocks_Bb, 80) * (scales & 15).float()
    minimum = _half(blocks_Bb, 82) * (scales >> 4).float()
    q = _fields(_words(blocks_Bb[:, 16:80], -1, 2, 4), 2)
    return q.view(torch.uint8).view(-1, 16, 16), scale.unsqueeze(2), minimum.neg_().unsqueeze(2)


def _q3_k(blocks_Bb: Tensor) -> _Unpacked:
    # There are sixteen six-bit scales in twelve bytes: the low four bits in eight bytes, the high two bits in four.
    low, high = blocks_Bb[:, 96:104], blocks_Bb[:, 104:108]
    scales = torch.cat((low & 15, low >> 4), dim=1)
    scales |= torch.cat([((high >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], dim=1)
    scale = _half(blocks_Bb, 108) * scales.float().sub_(32)
    q = _fields(_words(blocks_Bb[:, 32:96], -1, 2, 4), 2)
    third_bits = _fields(_words(blocks_Bb[:, :32], -1, 1, 4), 1) << 2
    q = _minus(q.bitwise_or_(third_bits.view(q.shape)), 4)
    return q.view(torch.int8).view(-1, 16, 16), scale.unsqueeze(2), None


def _k_scales(blocks_Bb: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset of the eight groups of Q4_K and Q5_K.

    They are six-bit numbers in the twelve bytes from byte 4 on. Four bytes contain scales 0-3, and four contain
    minimums 0-3; their top two bits belong to scales and minimums 4-7. The nibbles of the last four bytes are the low
    bits of scales and minimums 4-7.
    """
    first, second, last = blocks_Bb[:, 4:8], blocks_Bb[:, 8:12], blocks_Bb[:, 12:16]
    scales = torch.cat((first & 63, (last & 15) | ((first >> 2) & 48)), dim=1)
    minimums = torch.cat((second & 63, (last >> 4) | ((second >> 2) & 48)), dim=1)
    scale = _half(blocks_Bb, 0) * scales.float()
    minimum = _half(blocks_Bb, 2) * minimums.float()
    return scale.unsqueeze(2), minimum.neg_().unsqueeze(2)


def _q4_k(blocks_Bb: Tensor) -> _Unpacked:
    q = _fields(_words(blocks_Bb[:, 16:], -1, 4, 4), 4)
    return q.view(torch.uint8).view(-1, 8, 32), *_k_scales(blocks_Bb)


def _q5_k(blocks_Bb: Tensor) -> _Unpacked:
    q = _fields(_words(blocks_Bb[:, 48:], -1, 4, 4), 4)
    fifth_bits = _fields(_words(blocks_Bb[:, 16:48], -1, 1, 4), 1) << 4
    q.bitwise_or_(fifth_bits.view(q.shape))
    return q.view(torch.uint8).view(-1, 8, 32), *_k_scales(blocks_Bb)


def _q6_k(blocks_Bb: Tensor) -> _Unpacked:
    scale = _half(blocks_Bb, 208) * blocks_Bb[:, 192:208].view(torch.int8).float()
    q = _fields(_words(blocks_Bb[:, :128], -1, 2, 8), 4)
    high_bits = _fields(_words(blocks_Bb[:, 128:192], -1, 2, 4), 2) << 4
    q = _minus(q.bitwise_or_(high_bits.view(q.shape)), 32)
    return q.view(torch.int8).view(-1, 16, 16), scale.unsqueeze(2), None


def _codes(name: str) -> Callable[[Tensor], _Unpacked]:
    def unpack(blocks_Bb: Tensor) -> _Unpacked:
        # Imported here, because its tables need torch.
        from . import codebooks

        unpacked: _Unpacked = getattr(codebooks, name)(blocks_Bb)
        return unpacked

    return unpack


class BlockType(msgspec.Struct, frozen=True):
    """A quantized type: integers from -`zero` to 2 ** `bits` - 1 - `zero`, and the function that unpacks them.

    `scale_dtype` is the dtype of scales in matrices that stay quantized. `minifloats` is the field of
    `QuantizedMatrix`.
    """

    bits: int
    zero: int
    unpack: Callable[[Tensor], _Unpacked]
    scale_dtype: str = "float16"
    minifloats: Literal["mxfp4", "nvfp4"] | None = None


BLOCK_TYPES = {
    T.Q8_0: BlockType(8, 128, _q8_0),
    T.Q4_0: BlockType(4, 8, _q4_0),
    T.Q4_1: BlockType(4, 0, _q4_1),
    T.Q5_0: BlockType(5, 16, _q5_0),
    T.Q5_1: BlockType(5, 0, _q5_1),
    T.Q2_K: BlockType(4, 0, _q2_k),
    T.Q3_K: BlockType(4, 4, _q3_k),
    T.Q4_K: BlockType(4, 0, _q4_k),
    T.Q5_K: BlockType(5, 0, _q5_k),
    T.Q6_K: BlockType(6, 32, _q6_k),
    T.IQ4_NL: BlockType(8, 128, _codes("iq4_nl")),
    T.IQ4_XS: BlockType(8, 128, _codes("iq4_xs")),
    T.IQ3_XXS: BlockType(8, 128, _codes("iq3_xxs")),
    T.IQ3_S: BlockType(8, 128, _codes("iq3_s")),
    T.IQ2_XXS: BlockType(8, 128, _codes("iq2_xxs")),
    T.IQ2_XS: BlockType(8, 128, _codes("iq2_xs")),
    T.IQ2_S: BlockType(8, 128, _codes("iq2_s")),
    T.IQ1_S: BlockType(8, 128, _codes("iq1_s")),
    T.IQ1_M: BlockType(8, 128, _codes("iq1_m")),
    T.TQ1_0: BlockType(4, 8, _codes("tq1_0")),
    T.TQ2_0: BlockType(4, 8, _codes("tq2_0")),
    T.Q1_0: BlockType(4, 8, _codes("q1_0")),
    T.Q2_0: BlockType(4, 8, _codes("q2_0")),
    # In formats of 4 bits, zero would not be exact.
    T.I2_S: BlockType(8, 128, _codes("i2_s"), "float32"),
    T.MXFP4: BlockType(5, 16, _codes("mxfp4"), "bfloat16", "mxfp4"),
    T.NVFP4: BlockType(5, 16, _codes("nvfp4"), minifloats="nvfp4"),
}
"""Quantized types, by their GGUF type. Kernels support 4 bits or more, so smaller types are unpacked to 4 bits.

Types with codebooks are unpacked to 5 or 8 bits.
"""

WITH_CODEBOOKS = {
    ggml_type
    for ggml_type in BLOCK_TYPES
    if ggml_type.name.startswith(("IQ", "TQ", "I2", "MXFP", "NVFP", "Q1_0", "Q2_0"))
}
"""Types whose blocks contain indices into tables, which unpacking them on a GPU copies there."""

DEQUANTIZABLE: dict[T, Callable[[Tensor, Tensor], None]] = {
    T.F32: _stored_as("float32"),
    T.F16: _stored_as("float16"),
    T.BF16: _stored_as("bfloat16"),
    T.I32: _stored_as("int32"),
    **{ggml_type: _quantized(block.unpack) for ggml_type, block in BLOCK_TYPES.items()},
}
"""Types that can be dequantized, each with a function that writes blocks to a tensor ``[B, block size]``."""
