import re

import numpy as np
import pytest
import torch
from engine.protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType
from engine.workers.loaders.dequantize import BLOCK_TYPES, DEQUANTIZABLE, dequantize, unpack_matrix
from gguf.constants import GGMLQuantizationType as ReferenceType
from gguf.quants import dequantize as reference_dequantize

torch.set_num_threads(1)

# The gguf package does not have I2_S.
ALL_TYPES = [each for each in DEQUANTIZABLE if each is not GGMLQuantizationType.I2_S]
TYPES = pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
# Where a block has its float16 scales.
SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ1_S": (0,), "IQ1_M": (54,), "TQ1_0": (52,), "TQ2_0": (64,),
    "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip


def with_finite_scales(raw: np.ndarray, ggml_type: GGMLQuantizationType) -> np.ndarray:
    """Clear the lowest exponent bit of each scale, so that it is finite."""
    for at in SCALES_AT.get(ggml_type.name, ()):
        raw[:, at + 1] &= 0xFB
    return raw


def random_blocks(ggml_type: GGMLQuantizationType, num_blocks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    _, block_bytes = BLOCK_SIZES[ggml_type]
    raw = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    return with_finite_scales(raw, ggml_type)


def uniform_blocks(ggml_type: GGMLQuantizationType) -> np.ndarray:
    """Return one block for every byte value, filled with it."""
    _, block_bytes = BLOCK_SIZES[ggml_type]
    raw = np.repeat(np.arange(256, dtype=np.uint8)[:, None], block_bytes, axis=1)
    return with_finite_scales(raw, ggml_type)


def reference(raw: np.ndarray, ggml_type: GGMLQuantizationType) -> np.ndarray:
    """Return the result of the gguf package, float32 ``[rows, columns]``, or of ggml where the package has none."""
    if ggml_type is GGMLQuantizationType.I32:
        return raw.view(np.int32).astype(np.float32)
    if ggml_type.name in ("Q1_0", "Q2_0"):
        num_bits = 1 if ggml_type.name == "Q1_0" else 2
        blocks = np.ascontiguousarray(raw).reshape(-1, 18)
        codes = blocks[:, 2:, None] >> np.arange(0, 8, num_bits) & (1 << num_bits) - 1
        levels = np.array([-1, 1] if num_bits == 1 else [-1, 0, 1, 2], np.float32)[codes]
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return (levels.reshape(len(blocks), -1) * scales).reshape(len(raw), -1)
    with np.errstate(all="ignore"):
        values = reference_dequantize(raw.reshape(-1), ReferenceType(ggml_type))
    return values.astype(np.float32).reshape(len(raw), -1)


def bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns, with one pattern for all NaNs."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


@TYPES
def test_values_are_bit_identical_to_the_reference(ggml_type: GGMLQuantizationType) -> None:
    # More than one chunk of work, and a last one that is not full.
    block_size, _ = BLOCK_SIZES[ggml_type]
    raw = random_blocks(ggml_type, 300_001 // block_size)
    raw = np.concatenate((raw, uniform_blocks(ggml_type)))
    values = dequantize(raw, ggml_type, torch.float32)
    assert values.shape == (len(raw), block_size)
    assert np.array_equal(bits(values.numpy()), bits(reference(raw, ggml_type)))


@TYPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantizing_to_half_precision_rounds_the_float32_values(
    ggml_type: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    raw = random_blocks(ggml_type, 100)
    values = dequantize(raw, ggml_type, dtype)
    expected = torch.from_numpy(reference(raw, ggml_type)).to(dtype)
    assert values.dtype == dtype
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@TYPES
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 4), (3, 4), (2, 2)])
def test_a_range_of_columns_is_dequantized(
    ggml_type: GGMLQuantizationType, first: int, last: int
) -> None:
    num_rows, num_columns = 700, 4
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    raw = random_blocks(ggml_type, num_rows * num_columns).reshape(num_rows, -1)
    values = dequantize(raw[:, first * block_bytes : last * block_bytes], ggml_type, torch.float32)
    expected = reference(raw, ggml_type)[:, first * block_size : last * block_size]
    assert np.array_equal(bits(values.numpy()), bits(np.ascontiguousarray(expected)))


@TYPES
def test_a_tensor_without_rows_is_empty(ggml_type: GGMLQuantizationType) -> None:
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    raw = np.empty((0, 2 * block_bytes), np.uint8)
    assert dequantize(raw, ggml_type, torch.float32).shape == (0, 2 * block_size)


def test_the_source_is_not_modified() -> None:
    raw = random_blocks(GGMLQuantizationType.F32, 8)
    raw.setflags(write=False)
    before = raw.copy()
    dequantize(raw, GGMLQuantizationType.F32, torch.float32).zero_()
    assert np.array_equal(raw, before)


@pytest.mark.parametrize(
    "ggml_type", [each for each in BLOCK_TYPES if each in ALL_TYPES], ids=lambda t: t.name
)
def test_unpacked_integers_and_scales_give_the_values(ggml_type: GGMLQuantizationType) -> None:
    raw = random_blocks(ggml_type, 60)
    for at in SCALES_AT.get(ggml_type.name, ()):
        # These scales have an ordinary size, so that float16 can represent their products with other scales.
        raw[:, at + 1] = raw[:, at + 1] & 0x83 | 0x24
    if ggml_type.name == "MXFP4":
        raw[:, 0] >>= 1
    raw = raw.reshape(6, -1)
    matrix = unpack_matrix(torch.from_numpy(raw), ggml_type)
    expected = dequantize(raw, ggml_type, torch.float32)
    assert matrix.bits is not None
    assert int(matrix.values_OD.max()) < 1 << matrix.bits
    found = matrix.dequantize(torch.float32)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    if not re.search("K|IQ[123]|XS", ggml_type.name):
        assert torch.equal(found, expected)
