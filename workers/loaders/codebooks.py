"""Unpack GGUF blocks whose elements are indices into codebooks: the IQ and TQ types, I2_S, MXFP4 and NVFP4.

Each function unpacks blocks ``[B, b]`` in the form that `dequantize` uses: q int8 ``[B, G, N]``, and scale and offset
float32 ``[B, G, 1]``.

Shapes: B blocks, b bytes of a block, G groups of a block, N elements of a group.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from .quantization.microscaling import E2M1_TWICE, halves_of_powers

Unpacked = tuple[Tensor, Tensor, Tensor | None]

_BYTES = torch.arange(256)
_SIGNS = (1 - 2 * (_BYTES[:, None] >> torch.arange(8) & 1)).to(torch.int8)
"""The signs, int8 [256, 8], of eight elements, given a byte with one sign bit each."""

_PARITIES = sum(_BYTES[:128] >> i & 1 for i in range(7)) % 2
_EVEN_SIGNS = _SIGNS[_BYTES[:128] | _PARITIES << 7]
"""The signs, int8 [128, 8], of eight elements, given seven sign bits. The eighth makes the number of negatives even."""


_EXPONENTS, _MANTISSAS = _BYTES >> 3 & 15, (_BYTES & 7).float()
_NVFP4_SCALES = torch.where(
    _EXPONENTS == 0, _MANTISSAS * 2.0**-9, (1 + _MANTISSAS / 8) * 2.0 ** (_EXPONENTS - 7)
)
"""The scale, float32 [256], for each byte of float8 (e4m3). Signs are ignored, and 127 means 0."""

_NVFP4_SCALES[127] = 0


def _quants() -> ModuleType:
    # Imported only for files that need it, because it takes a twentieth of a worker's start time.
    from gguf import quants

    return quants


@cache
def _non_linear() -> Tensor:
    """Return the values of IQ4_NL, int8 [16]."""
    return torch.tensor(_quants().IQ4_NL.kvalues, dtype=torch.int8)


@cache
def _grid(name: str) -> Tensor:
    """Return the codebook of a type, int8 ``[codes, elements per code]``."""
    codebook = getattr(_quants(), name)
    codebook.init_grid()
    return torch.from_numpy(codebook.grid).reshape(codebook.grid_shape).to(torch.int8)


def _view(blocks_Bb: Tensor, start: int, stop: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the bytes from `start` to `stop` of each block as unsigned integers of `dtype`, in int64 ``[B, n]``."""
    part = blocks_Bb[:, start:stop].contiguous().view(dtype).long()
    return part & ((1 << 8 * dtype.itemsize) - 1)


def _half(blocks_Bb: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block, as float32 ``[B, 1]``."""
    return blocks_Bb[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(x_Bn: Tensor, shifts: list[int], mask: int) -> Tensor:
    """Return the bit fields of each number, next to each other: ``[B, n * len(shifts)]``."""
    return (x_Bn.unsqueeze(-1) >> torch.tensor(shifts) & mask).flatten(1)


def _nibbles(bytes_Bn: Tensor, group_bytes: int) -> Tensor:
    """Return the low nibbles of each group of bytes, then the high ones: ``[B, G, 2 * group_bytes]``."""
    groups = bytes_Bn.unflatten(1, (-1, group_bytes))
    return torch.cat((groups & 15, groups >> 4), -1)


def iq4_nl(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ4_NL: nibbles are indices into a table of 16 values."""
    q = _non_linear()[_nibbles(_view(blocks_Bb, 2, 18), 16)]
    return q, _half(blocks_Bb, 0).unsqueeze(2), None


def iq4_xs(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ4_XS: IQ4_NL with a six-bit scale per 32 elements."""
    high = _fields(_view(blocks_Bb, 2, 4, torch.int16), list(range(0, 16, 2)), 3)
    low = _fields(_view(blocks_Bb, 4, 8), [0, 4], 15)
    scale = _half(blocks_Bb, 0) * ((low | high << 4) - 32).float()
    q = _non_linear()[_nibbles(_view(blocks_Bb, 8, 136), 16)]
    return q, scale.unsqueeze(2), None


def mxfp4(blocks_Bb: Tensor) -> Unpacked:
    """Unpack MXFP4: four-bit floats in groups of 32 that share a power of two."""
    q = E2M1_TWICE[_nibbles(_view(blocks_Bb, 1, 17), 16)]
    return q, halves_of_powers(blocks_Bb[:, :1]).unsqueeze(2), None


def nvfp4(blocks_Bb: Tensor) -> Unpacked:
    """Unpack NVFP4: four-bit floats in groups of 16 that share a float8 scale."""
    q = E2M1_TWICE[_nibbles(_view(blocks_Bb, 4, 36), 8)]
    return q, _NVFP4_SCALES[_view(blocks_Bb, 0, 4)].mul(0.5).unsqueeze(2), None


def _even_signs(words_BG: Tensor) -> Tensor:
    """Return the signs of four times eight elements, given by the low 28 bits: ``[B, G, 32]``."""
    return _EVEN_SIGNS[_fields(words_BG, [0, 7, 14, 21], 127)].view(*words_BG.shape, 32)


def iq2_xxs(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ2_XXS: codes for eight elements each, and words with one scale and the signs for four codes."""
    words = _view(blocks_Bb, 2, 66, torch.int32).unflatten(1, (-1, 2))
    codes = _fields(words[..., 0].flatten(1), [0, 8, 16, 24], 255)
    scale = _half(blocks_Bb, 0) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    q = _grid("IQ2_XXS")[codes].view(len(codes), 8, 32) * _even_signs(words[..., 1])
    return q, scale.unsqueeze(2), None


def _half_scales(scales_Bn: Tensor, unit: Tensor) -> Tensor:
    """Return the scales, one nibble per 16 elements: float32 ``[B, 16, 1]``."""
    return (unit * (0.5 + _fields(scales_Bn, [0, 4], 15).float()) * 0.25).unsqueeze(2)


def iq2_xs(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ2_XS: nine-bit codes, stored together with the signs of their elements."""
    codes = _view(blocks_Bb, 2, 66, torch.int16)
    q = _grid("IQ2_XS")[codes & 511] * _EVEN_SIGNS[codes >> 9]
    scale = _half_scales(_view(blocks_Bb, 66, 74), _half(blocks_Bb, 0))
    return q.view(len(codes), 16, 16), scale, None


def iq2_s(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ2_S: ten-bit codes, with all signs stored."""
    codes = _view(blocks_Bb, 2, 34) | _fields(_view(blocks_Bb, 66, 74), [0, 2, 4, 6], 3) << 8
    q = _grid("IQ2_S")[codes] * _SIGNS[_view(blocks_Bb, 34, 66)]
    scale = _half_scales(_view(blocks_Bb, 74, 82), _half(blocks_Bb, 0))
    return q.view(len(codes), 16, 16), scale, None


def iq3_xxs(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ3_XXS: codes for four elements each, and words with one scale and the signs for eight codes."""
    codes, words = _view(blocks_Bb, 2, 66), _view(blocks_Bb, 66, 98, torch.int32)
    scale = _half(blocks_Bb, 0) * (0.5 + (words >> 28).float()) * 0.5
    q = _grid("IQ3_XXS")[codes].view(len(codes), 8, 32) * _even_signs(words)
    return q, scale.unsqueeze(2), None


def iq3_s(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ3_S: nine-bit codes for four elements each, with all signs stored."""
    codes = _view(blocks_Bb, 2, 66) | _fields(_view(blocks_Bb, 66, 74), list(range(8)), 1) << 8
    signs = _SIGNS[_view(blocks_Bb, 74, 106)].view(len(codes), 8, 32)
    scale = _half(blocks_Bb, 0) * (1 + 2 * _fields(_view(blocks_Bb, 106, 110), [0, 4], 15)).float()
    return _grid("IQ3_S")[codes].view(len(codes), 8, 32) * signs, scale.unsqueeze(2), None


def iq1_s(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ1_S: codes for eight ternary elements each, to which an eighth is added or subtracted."""
    high = _view(blocks_Bb, 34, 50, torch.int16)
    codes = _view(blocks_Bb, 2, 34) | _fields(high, [0, 3, 6, 9], 7) << 8
    eighths = 1 - 2 * (high >> 15)
    q = _grid("IQ1_S")[codes].view(len(codes), 8, 32) * 8 + eighths.unsqueeze(2).to(torch.int8)
    scale = _half(blocks_Bb, 0) * (2 * (high >> 12 & 7) + 1).float()
    return q, scale.mul(0.125).unsqueeze(2), None


def iq1_m(blocks_Bb: Tensor) -> Unpacked:
    """Unpack IQ1_M: IQ1_S with a scale per 16 elements. Four scales together contain the bits of a float16 scale."""
    scales = _view(blocks_Bb, 48, 56, torch.int16)
    unit = (scales >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    unit = unit.to(torch.int16).view(torch.float16).float()
    high = _fields(_view(blocks_Bb, 32, 48), [0, 4], 15)
    codes = _view(blocks_Bb, 0, 32) | (high & 7) << 8
    eighths = (1 - 2 * (high >> 3)).unsqueeze(2).to(torch.int8)
    q = (_grid("IQ1_S")[codes] * 8 + eighths).view(len(codes), 16, 16)
    scale = unit * (2 * _fields(scales, [0, 3, 6, 9], 7) + 1).float()
    return q, scale.mul(0.125).unsqueeze(2), None


def tq1_0(blocks_Bb: Tensor) -> Unpacked:
    """Unpack TQ1_0: five ternary elements per byte, and four per byte at the end of the block."""

    def digits(start: int, stop: int, count: int) -> Tensor:
        powers = torch.tensor([[1], [3], [9], [27], [81]])[:count]
        return (_view(blocks_Bb, start, stop).unsqueeze(1) * powers & 255).flatten(1)

    packed = torch.cat((digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)), 1)
    q = (packed * 3 >> 8) - 1
    return q.to(torch.int8).unsqueeze(1), _half(blocks_Bb, 52).unsqueeze(2), None


def tq2_0(blocks_Bb: Tensor) -> Unpacked:
    """Unpack TQ2_0: ternary elements of two bits each."""
    groups = _view(blocks_Bb, 0, 64).unflatten(1, (2, 1, 32))
    q = (groups >> torch.tensor([[0], [2], [4], [6]]) & 3) - 1
    return q.flatten(1).to(torch.int8).unsqueeze(1), _half(blocks_Bb, 64).unsqueeze(2), None


def q1_0(blocks_Bb: Tensor) -> Unpacked:
    """Unpack Q1_0: signs of one bit each."""
    bits = _view(blocks_Bb, 2, 18).unsqueeze(2) >> torch.arange(8) & 1
    return (
        (2 * bits - 1).flatten(1).to(torch.int8).unsqueeze(1),
        _half(blocks_Bb, 0).unsqueeze(2),
        None,
    )


def q2_0(blocks_Bb: Tensor) -> Unpacked:
    """Unpack Q2_0: integers of two bits each, from -1 to 2."""
    q = (_view(blocks_Bb, 2, 18).unsqueeze(2) >> torch.tensor([0, 2, 4, 6]) & 3) - 1
    return q.flatten(1).to(torch.int8).unsqueeze(1), _half(blocks_Bb, 0).unsqueeze(2), None


def i2_s(blocks_Bb: Tensor) -> Unpacked:
    """Unpack I2_S: ternary elements of two bits each, and the float32 scale of the whole tensor."""
    groups = _view(blocks_Bb, 0, 32).unsqueeze(1)
    q = (groups >> torch.tensor([[6], [4], [2], [0]]) & 3) - 1
    scale = blocks_Bb[:, 32:36].contiguous().view(torch.float32)
    return q.flatten(1).to(torch.int8).unsqueeze(1), scale.unsqueeze(2), None
