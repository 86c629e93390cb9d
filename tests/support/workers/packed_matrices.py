"""Packed matrices with random values, and their products by the native kernels."""

import ctypes

import numpy as np
import torch
from engine.protocol.checkpoint.gguf import BLOCK_SIZES
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from engine.workers.cpu.library import native_library
from engine.workers.cpu.packing import (
    ActivationKind,
    PackedWeight,
    WeightFormat,
    WeightMemory,
    allocate_packed,
    pack_rows,
)
from engine.workers.loaders.dequantize import dequantize
from numpy.typing import NDArray

T, F = SourceType, WeightFormat

Floats = NDArray[np.float32]

MANY_ROWS = 70

FLOAT8 = 1000
"""The number of rows of float8 and their scales, which GGUF does not have."""

FLOAT8_GROUP = 96

EXACT = [
    (T.Q4_0, F.U4),
    (T.Q5_0, F.U5_OFFSET),
    (T.Q8_0, F.U8),
    (T.BF16, F.BF16),
    (T.BF16, F.BF16_TILES),
    (T.BF16, F.F32),
    (T.F16, F.F16),
    (T.F32, F.F32),
    (T.MXFP4, F.MXFP4),
    (T.NVFP4, F.NVFP4),
    (FLOAT8, F.F8),
]

PRODUCT_OF_SCALES_ROUNDED = [(T.Q4_K, F.U4_OFFSET), (T.Q5_K, F.U5_OFFSET), (T.Q6_K, F.U6)]

CENTRE_ROUNDED = [(T.Q4_1, F.U4_OFFSET), (T.Q5_1, F.U5_OFFSET)]

PACKINGS = EXACT + CENTRE_ROUNDED + PRODUCT_OF_SCALES_ROUNDED

FLOAT_TYPES = {T.F32: torch.float32, T.F16: torch.float16, T.BF16: torch.bfloat16}


def stored_matrix(source_type: int, n: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return a random matrix as a checkpoint stores it, ``[n, row bytes]``."""
    rng = np.random.default_rng(seed)
    if source_type == FLOAT8:
        codes = rng.integers(0, 127, (n, k), np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7
        scales = rng.uniform(-1e-3, 1e-3, (n, -(-k // FLOAT8_GROUP))).astype(np.float32)
        return np.concatenate((codes, scales.view(np.uint8)), 1)
    source_type = SourceType(source_type)
    if source_type in FLOAT_TYPES:
        values = torch.from_numpy(rng.standard_normal((n, k), np.float32))
        return values.to(FLOAT_TYPES[source_type]).view(torch.uint8).numpy()
    block_size, block_bytes = BLOCK_SIZES[source_type]
    blocks = rng.integers(0, 256, (n, k // block_size, block_bytes), np.uint8)

    def set_half(at: int, low: float, high: float) -> None:
        halves = rng.uniform(low, high, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)

    if source_type is T.MXFP4:
        blocks[..., 0] = rng.integers(112, 124, blocks.shape[:2])
        return blocks.reshape(n, -1)
    if source_type is T.NVFP4:
        return blocks.reshape(n, -1)
    set_half(208 if source_type is T.Q6_K else 0, -1e-2, 1e-2)
    if source_type in (T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K):
        set_half(2, -1e-1, 1e-1)
    return blocks.reshape(n, -1)


def values_of(stored: NDArray[np.uint8], source_type: int, k: int) -> Floats:
    if source_type != FLOAT8:
        return dequantize(stored, SourceType(source_type), torch.float32).numpy()
    codes = torch.from_numpy(stored[:, :k].copy()).view(torch.float8_e4m3fn)
    scales = stored[:, k:].copy().view(np.float32)
    return codes.float().numpy() * scales.repeat(FLOAT8_GROUP, 1)[:, :k]


def packed(stored: NDArray[np.uint8], source_type: int, weight_format: F, k: int) -> PackedWeight:
    memory = WeightMemory()
    weight = allocate_packed(weight_format, len(stored), k, memory, FLOAT8_GROUP)
    pack_rows(weight, source_type, stored)
    return weight


def random_weight(source_type: int, weight_format: F, n: int, k: int) -> PackedWeight:
    return packed(stored_matrix(source_type, n, k), source_type, weight_format, k)


def activations(rows: int, k: int, seed: int = 1) -> Floats:
    """Return rows of very different magnitudes, with outliers."""
    rng = np.random.default_rng(seed)
    x_RK = rng.standard_normal((rows, k), np.float32) * np.exp2(rng.integers(-8, 8, (rows, 1)))
    x_RK[:, rng.integers(0, k, 2)] *= 30
    return x_RK.astype(np.float32)


def quantized(
    weight: PackedWeight, x_RK: Floats, kind: ActivationKind | None = None
) -> NDArray[np.uint8]:
    library = native_library()
    kind = weight.activation_kind if kind is None else kind
    row_bytes = library.engine_activation_row_bytes(kind, weight.k)
    out = WeightMemory().allocate(row_bytes * len(x_RK)).reshape(len(x_RK), row_bytes)
    library.engine_quantize_rows(
        kind,
        x_RK.ctypes.data,
        x_RK.strides[0] // 4,
        len(x_RK),
        weight.k,
        out.ctypes.data,
    )
    return out


def multiply(
    weight: PackedWeight,
    x_RK: Floats,
    n_begin: int = 0,
    n_end: int | None = None,
    kind: ActivationKind | None = None,
) -> Floats:
    n_end = weight.n if n_end is None else n_end
    kind = weight.activation_kind if kind is None else kind
    x_quantized = quantized(weight, x_RK, kind)
    # A column more than is written, which must stay as it is.
    out = np.full((len(x_RK), n_end - n_begin + 1), 7.0, np.float32)
    native_library().engine_linear_rows(
        ctypes.byref(weight),
        kind,
        x_quantized.ctypes.data,
        len(x_RK),
        n_begin,
        n_end,
        out.ctypes.data,
        out.shape[1],
    )
    assert (out[:, -1] == 7.0).all()
    return out[:, :-1]


def columns_of(weight_format: WeightFormat, k: int) -> int:
    """Return a number of columns near `k`; float matrices may have any number."""
    return k if weight_format <= F.U8 else k + 3
