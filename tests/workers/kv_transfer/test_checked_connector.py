"""Blocks that a connector fills with NaN or infinity are invalid, in every format and in every kind of group."""

from __future__ import annotations

import numpy as np
import pytest
from engine.workers.attention.interface import AttentionSpec
from engine.workers.cpu.attention import NativeAttention
from engine.workers.device.dtypes import HostDevice, configured_dtype
from engine.workers.kv_transfer.block_regions import BlockRegions, Numbers, Region

HEADS, BLOCK_SIZE, HEAD_DIM = 3, 16, 24
NUM_BLOCKS = 4


def regions_of(dtype: str) -> tuple[BlockRegions, int]:
    """Return the regions of a native cache with one layer, and the bytes of a block."""
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=configured_dtype(dtype, HostDevice()),
        device=HostDevice(),
    )
    attention = NativeAttention(spec)
    item = attention.dtype.itemsize
    (heads,) = attention.head_regions(HEADS)
    numbers = Numbers(dtype)
    if heads.period:
        numbers = Numbers("float32", heads.period, heads.num_scale_bytes)
    region = Region("0", 0, 0, 0, (1,), (0,), HEADS, heads.unit_elements * item, numbers)
    return BlockRegions([region], 0, 1, b"f"), attention.elements_of_layer * item


BITS = {
    "bfloat16": (np.uint16, 0x3F80, (0x7F80, 0xFF80, 0x7FC0)),
    "float16": (np.uint16, 0x7BFF, (0x7C00, 0xFC00, 0x7E01)),
    "float32": (np.uint32, 0x7F7FFFFF, (0x7F800000, 0xFF800000, 0x7FC00001)),
}
"""For each format the bits of a finite number, and those of others."""


@pytest.mark.parametrize("dtype", BITS)
def test_one_number_that_is_not_finite_makes_a_block_invalid(dtype: str) -> None:
    regions, block_bytes = regions_of(dtype)
    bits, finite, others = BITS[dtype]
    for other in others:
        for place in (0, block_bytes // bits().itemsize - 1):
            blocks = np.full((NUM_BLOCKS, block_bytes // bits().itemsize), finite, bits)
            blocks[2, place] = other
            found = regions.find_non_finite(0, lambda page, blocks=blocks: blocks.view(np.uint8))
            assert found.tolist() == [False, False, True, False]


def test_integers_may_be_anything_but_their_scales_must_be_finite() -> None:
    regions, block_bytes = regions_of("int8")
    padded, scale_bytes = 32, 4 * BLOCK_SIZE
    part_bytes = BLOCK_SIZE * padded + scale_bytes
    assert block_bytes == HEADS * 2 * part_bytes
    blocks = np.full((NUM_BLOCKS, HEADS * 2, part_bytes), 0xFF, np.uint8)
    blocks[:, :, BLOCK_SIZE * padded :] = 0
    pages = blocks.reshape(NUM_BLOCKS, -1)
    assert not regions.find_non_finite(0, lambda page: pages).any()
    for part in (0, HEADS * 2 - 1):
        for place in (-4, -scale_bytes):
            scale = blocks[1, part, BLOCK_SIZE * padded :].view(np.float32)
            scale[place // 4] = np.nan
            found = regions.find_non_finite(0, lambda page: pages)
            assert found.tolist() == [False, True, False, False]
            scale[place // 4] = 1


def test_each_group_has_its_own_numbers() -> None:
    """A block of a recurrent state has float32, then other numbers, in several tensors."""
    state = Region("0", 1, 1, 0, (1,), (0,), 2, 8, Numbers("float32"))
    inputs = Region("1", 1, 1, 16, (3,), (8,), 2, 4, Numbers("bfloat16"))
    keys = Region("2", 0, 0, 0, (1,), (0,), 1, 40, Numbers("float16"))
    regions = BlockRegions([state, inputs, keys], 0, 1, b"f")
    block = np.zeros((1, 40), np.uint8)
    block[0, 16:].view(np.uint16)[11] = 0x7FC0
    assert regions.find_non_finite(1, lambda page: block).tolist() == [True]
    assert regions.find_non_finite(1, lambda page: np.zeros_like(block)).tolist() == [False]
    # As float16, the same bits are a NaN; as half of a float32 they need not be one.
    assert regions.find_non_finite(0, lambda page: block).tolist() == [True]
    block[0, 16:] = 0
    block[0, :16].view(np.uint16)[0] = 0x7FC0
    assert regions.find_non_finite(1, lambda page: block).tolist() == [False]
    assert not regions.find_non_finite(2, lambda page: block).any()
