"""Simple quantizers to GGUF's types: plain rounding within the range of a group, no search.

N rows of K elements; B blocks of a row, G groups of a block.
"""

from __future__ import annotations

import gguf
import numpy as np
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize(values_NK: Floats, ggml_type: GGMLType) -> Bytes:
    """Return the rows as GGUF stores them, uint8 ``[N, row bytes]``."""
    # The type may be the gguf package's own.
    ggml_type = GGMLType(int(ggml_type))
    if ggml_type is GGMLType.F32:
        return np.ascontiguousarray(values_NK, np.float32).view(np.uint8)
    if ggml_type in (GGMLType.Q4_K, GGMLType.Q5_K):
        return _q45_k(values_NK, levels=15 if ggml_type is GGMLType.Q4_K else 31)
    if ggml_type is GGMLType.Q6_K:
        return _q6_k(values_NK)
    stored = gguf.quants.quantize(values_NK, gguf.GGMLQuantizationType(int(ggml_type)))
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values_NK), -1)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, values_NK: Floats, ggml_type: GGMLType | None = None
) -> None:
    """Add a tensor to a file, quantized if a type is given."""
    if ggml_type is None:
        writer.add_tensor(name, values_NK)
    else:
        stored = gguf.GGMLQuantizationType(int(ggml_type))
        writer.add_tensor(name, quantize(values_NK, ggml_type), raw_dtype=stored)


def _half(x: Floats) -> Bytes:
    """Return the bytes of float16 values, ``[...]`` to ``[..., 2]``."""
    return x.astype(np.float16)[..., None].view(np.uint8)


def _codes(x: Floats, scale: Floats, low: int, high: int) -> NDArray[np.int64]:
    quotient = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    return np.rint(quotient).clip(low, high).astype(np.int64)


def _q45_k(values_NK: Floats, levels: int) -> Bytes:
    """Quantize to eight groups of 32, each with a six-bit scale and minimum."""
    n = len(values_NK)
    x = values_NK.reshape(n, -1, 8, 32)
    minimum = np.maximum(-x.min(3), 0)
    scale = np.maximum(x.max(3) + minimum, 0) / levels
    of_scales, of_minima = (
        (part.max(2) / 63).astype(np.float16).astype(np.float32) for part in (scale, minimum)
    )
    scales = _codes(scale, np.broadcast_to(of_scales[..., None], scale.shape), 0, 63)
    minima = _codes(minimum, np.broadcast_to(of_minima[..., None], scale.shape), 0, 63)
    shifted = x + (minima * of_minima[..., None])[..., None].astype(np.float32)
    step = (scales * of_scales[..., None])[..., None].astype(np.float32)
    codes = _codes(shifted, np.broadcast_to(step, x.shape), 0, levels)
    packed = np.concatenate(
        (
            scales[..., :4] | scales[..., 4:] >> 4 << 6,
            minima[..., :4] | minima[..., 4:] >> 4 << 6,
            scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
        ),
        axis=2,
    )
    nibbles = codes & 15
    pairs = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    fifth_bits = (codes >> 4 << np.arange(8)[:, None]).sum(2)
    parts = [_half(of_scales), _half(of_minima), packed]
    parts += [fifth_bits] if levels > 15 else []
    parts += [pairs.reshape(n, -1, 128)]
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=2).reshape(n, -1)


def _q6_k(values_NK: Floats) -> Bytes:
    """Quantize to sixteen groups of 16, each with an int8 scale."""
    n = len(values_NK)
    x = values_NK.reshape(n, -1, 16, 16)
    scale = np.abs(x).max(3) / 31
    of_scales = (scale.max(2) / 127).astype(np.float16).astype(np.float32)
    scales = _codes(scale, np.broadcast_to(of_scales[..., None], scale.shape), 0, 127)
    step = (scales * of_scales[..., None])[..., None].astype(np.float32)
    codes = _codes(x, np.broadcast_to(step, x.shape), -32, 31) + 32
    # [half of the block, 32 elements apart, element]
    quarters = codes.reshape(n, -1, 2, 4, 32)
    low = quarters[:, :, :, :2] & 15 | (quarters[:, :, :, 2:] & 15) << 4
    high = (quarters >> 4 << 2 * np.arange(4)[:, None]).sum(3)
    parts = [low.reshape(n, -1, 128), high.reshape(n, -1, 64), scales, _half(of_scales)]
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=2).reshape(n, -1)
