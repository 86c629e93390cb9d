"""Ranks of one server get their parts of a block from the ranks of another, whatever their numbers are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from engine.protocol.block_hash import HASH_BYTES
from engine.workers.kv_transfer.block_regions import BlockRegions, PeerRank, Region
from engine.workers.layers.parallel.tensor_parallel import TensorParallel

UNITS = (1, 2, 4, 12)
ROWS, UNIT_BYTES = 3, 5
KEY = bytes(HASH_BYTES) + b"\1"


def block_of(rank: int, size: int) -> tuple[BlockRegions, list[bytearray], list[np.ndarray]]:
    """Return the regions of a rank's blocks, an empty block, and what each of its regions should have."""
    regions, pages, contents = [], [], []
    for page, units in enumerate(UNITS):
        part = TensorParallel(rank, size).part(units)
        row_bytes = len(part) * UNIT_BYTES
        regions.append(Region(f"{page}", 1, page, 7, (ROWS,), (row_bytes,), units, UNIT_BYTES))
        pages.append(bytearray(7 + ROWS * row_bytes))
        whole = np.random.default_rng(page).integers(0, 256, (ROWS, units, UNIT_BYTES), np.uint8)
        contents.append(whole[:, part.start : part.stop])
    regions.append(Region("another group", 0, 0, 0, (1,), (1,), 1, 1))
    return BlockRegions(regions, rank, size, b"f"), pages, contents


@pytest.mark.parametrize(("source_size", "target_size"), product((1, 2, 3, 4, 8), repeat=2))
def test_parts_from_all_ranks_make_whole_blocks(source_size: int, target_size: int) -> None:
    sources = [block_of(rank, source_size) for rank in range(source_size)]
    for _, pages, contents in sources:
        for page, content in zip(pages, contents, strict=True):
            page[7:] = content.tobytes()
    for rank in range(target_size):
        target, pages, contents = block_of(rank, target_size)
        parts = [memoryview(page) for page in pages]
        num_bytes = 0
        for number, (source, offered, _) in enumerate(sources):
            assert source.fingerprint == target.fingerprint
            peer = PeerRank(number, source_size)
            data = source.read(KEY, [memoryview(page) for page in offered], target.own)
            assert bool(data) <= target.has_part_of(peer)
            target.write(KEY, parts, peer, memoryview(data))
            num_bytes += len(data)
        # No byte comes twice.
        assert num_bytes == sum(content.size for content in contents)
        for page, content in zip(pages, contents, strict=True):
            assert page == bytes(7) + content.tobytes()


def test_data_of_another_size_is_refused() -> None:
    target, pages, _ = block_of(0, 2)
    parts = [memoryview(page) for page in pages]
    with pytest.raises(ValueError, match="1 bytes received for a part of a block"):
        target.write(KEY, parts, PeerRank(0, 1), memoryview(b"x"))
