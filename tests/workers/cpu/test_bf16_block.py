"""The lossless storage of bf16 matrices in 12 bits: weights and products are bit-identical.

R rows of activations, N rows of the matrix, K columns of both.
"""

import ctypes

import numpy as np
import pytest
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from engine.workers.cpu.library import native_library
from engine.workers.cpu.packing import (
    ActivationKind,
    PackedWeight,
    WeightFormat,
    WeightMemory,
    allocate_packed,
    finish_packing,
    pack_rows,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.suite.examples import examples
from support.workers.isas import ISAS, select_isa

Bits = NDArray[np.uint16]
Floats = NDArray[np.float32]


def packed(bits_NK: Bits) -> PackedWeight:
    n, k = bits_NK.shape
    memory = WeightMemory()
    weight = allocate_packed(WeightFormat.BF16, n, k, memory)
    for first in range(0, n, 64):
        pack_rows(weight, SourceType.BF16, bits_NK[first : first + 64].view(np.uint8), first)
    weight.array = memory.shrink(finish_packing(weight), weight.array)
    return weight


def bits_of(weight: PackedWeight) -> Bits:
    bits: Bits = (weight.rows(range(weight.n)).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def as_products_take_them(bits_NK: Bits) -> Bits:
    """Return the matrix as products read it: subnormal numbers are zeros of the same sign."""
    return np.where(bits_NK & 0x7F80, bits_NK, bits_NK & 0x8000).astype(np.uint16)


def multiply(weight: PackedWeight, x_RK: Floats) -> Floats:
    library = native_library()
    row_bytes = library.engine_activation_row_bytes(ActivationKind.BF16, weight.k)
    x = WeightMemory().allocate(row_bytes * len(x_RK))
    library.engine_quantize_rows(
        ActivationKind.BF16, x_RK.ctypes.data, weight.k, len(x_RK), weight.k, x.ctypes.data
    )
    out_RN = np.empty((len(x_RK), weight.n), np.float32)
    library.engine_linear_rows(
        ctypes.byref(weight),
        ActivationKind.BF16,
        x.ctypes.data,
        len(x_RK),
        0,
        weight.n,
        out_RN.ctypes.data,
        weight.n,
    )
    return out_RN


def trained_bits(n: int, k: int, seed: int = 0) -> Bits:
    """Return normally distributed weights, as a trained matrix has them."""
    values = np.random.default_rng(seed).standard_normal((n, k), np.float32) * np.float32(0.02)
    bits: Bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


def is_same(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


@pytest.mark.parametrize("order", ["of size", "shuffled"])
def test_every_bit_pattern_is_restored(order: str) -> None:
    bits_NK = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128)
    if order == "shuffled":
        bits_NK = np.random.default_rng(0).permutation(bits_NK.ravel()).reshape(512, 128)
    weight = packed(bits_NK)
    np.testing.assert_array_equal(bits_of(weight), as_products_take_them(bits_NK))


def test_trained_bf16_weights_take_twelve_bits_and_noise_sixteen() -> None:
    n, k = 256, 576
    assert len(packed(trained_bits(n, k)).array) * 8 / (n * k) < 12.2
    noise_NK = np.random.default_rng(0).integers(0, 1 << 16, (n, k)).astype(np.uint16)
    assert len(packed(noise_NK).array) * 8 / (n * k) < 16.1


SPECIAL = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0080]


@examples(30)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 300),
    seed=st.integers(0, 1 << 20),
    row_scales=st.integers(0, 120),
    share_of_others=st.sampled_from([0.0, 1e-4, 1e-2, 0.5]),
)
def test_weights_of_mixed_magnitudes_are_restored(
    n: int, k: int, seed: int, row_scales: int, share_of_others: float
) -> None:
    rng = np.random.default_rng(seed)
    values_NK = rng.standard_normal((n, k), np.float32)
    values_NK *= np.exp2(rng.integers(-row_scales, row_scales + 1, (n, 1)))
    bits_NK = (values_NK.view(np.uint32) >> 16).astype(np.uint16)
    is_other = rng.random((n, k)) < share_of_others
    bits_NK[is_other] = rng.choice(SPECIAL, is_other.sum())
    np.testing.assert_array_equal(bits_of(packed(bits_NK)), as_products_take_them(bits_NK))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [576, 131])
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_products_are_bit_identical_to_those_of_uncompressed_weights(
    rows: int, k: int, isa: int
) -> None:
    select_isa(isa)
    coded_NK = trained_bits(128, k)
    # With 32 columns of noise in each block, no step can be coded.
    plain_NK = np.random.default_rng(1).integers(0, 1 << 16, (192, k)).astype(np.uint16)
    kept = np.arange(192) % 64 < 43
    plain_NK[kept] = np.concatenate((coded_NK, coded_NK[:1]))
    coded, plain = packed(coded_NK), packed(plain_NK)
    assert len(coded.array) < 12.5 / 8 * coded_NK.size
    assert len(plain.array) > 2 * plain_NK.size
    x_RK = np.random.default_rng(2).standard_normal((rows, k), np.float32)
    assert is_same(multiply(plain, x_RK)[:, kept][:, :128], multiply(coded, x_RK))


@pytest.mark.parametrize("isa", ISAS)
def test_products_are_the_same_before_and_after_gaps_are_closed(isa: int) -> None:
    select_isa(isa)
    bits_NK = trained_bits(200, 300)
    weight = allocate_packed(WeightFormat.BF16, 200, 300, WeightMemory())
    pack_rows(weight, SourceType.BF16, bits_NK.view(np.uint8))
    x_RK = np.random.default_rng(3).standard_normal((2, 300), np.float32)
    before_RN = multiply(weight, x_RK)
    weight.array[finish_packing(weight) :] = 0xFF
    assert is_same(multiply(weight, x_RK), before_RN)
