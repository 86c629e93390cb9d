"""The parts of a KV-cache block that tensor-parallel ranks divide, and the parts that ranks of other sizes lack.

A region is an array within a block, such as the keys of one layer. One of its axes counts units, such as heads, of
which each rank has a consecutive part. If there are fewer units than ranks, several ranks have the same one. So the
bytes that a rank of one size has for a rank of another size follow from the two ranks and sizes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.block_hash import HASH_BYTES
from ..layers.parallel.tensor_parallel import TensorParallel


class Region(msgspec.Struct, frozen=True):
    """An array [*counts, units, unit_bytes] within a block, of which a rank has some units.

    Attributes:
        name: The same for all ranks, and unique within a pipeline stage.
        group: The KV-cache group of the blocks that contain the region.
        page: The cache tensor that contains the region.
        offset: The region's first byte in the block's part of that tensor.
        counts: The sizes of the outer axes.
        strides: The distances of their elements in bytes.
        units: The number of units of all ranks.
        unit_bytes: The size of a unit.
    """

    name: str
    group: int
    page: int
    offset: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    units: int
    unit_bytes: int

    def view(self, parts: Sequence[memoryview], num_units: int) -> NDArray[np.uint8]:
        """Return a view of the region, uint8 [*counts, num_units, unit_bytes], given the parts of a block."""
        page = np.frombuffer(parts[self.page], np.uint8)[self.offset :]
        return np.lib.stride_tricks.as_strided(
            page, (*self.counts, num_units, self.unit_bytes), (*self.strides, self.unit_bytes, 1)
        )


class PeerRank(msgspec.Struct, frozen=True):
    """A rank of another server, and the number of ranks that divide a layer there."""

    rank: int
    size: int


class BlockRegions:
    """The regions of one rank's blocks.

    Args:
        regions: All regions, in the same order on every rank.
        rank: The tensor-parallel rank.
        size: The number of tensor-parallel ranks.
        fingerprint: A hash of all that determines the bytes of the regions, besides the number of ranks. Ranks with
            equal fingerprints can exchange units.
    """

    def __init__(self, regions: Sequence[Region], rank: int, size: int, fingerprint: bytes) -> None:
        self.own = PeerRank(rank, size)
        self._regions: dict[int, list[Region]] = {}
        for region in regions:
            self._regions.setdefault(region.group, []).append(region)
        # The places in a block depend on the number of ranks.
        facts = [(x.name, x.group, x.counts, x.units, x.unit_bytes) for x in regions]
        digest = hashlib.sha256(b"engine.kv.regions.v1" + fingerprint)
        self.fingerprint: Final = digest.digest() + hashlib.sha256(repr(facts).encode()).digest()

    def read(self, key: bytes, parts: Sequence[memoryview], target: PeerRank) -> bytes:
        """Return the bytes of a block that this rank has for another rank.

        Args:
            key: The block's content key.
            parts: The block's parts in host memory.
            target: The rank that reads them.
        """
        pieces = self._pieces(key, parts, target, self.own)
        return b"".join(piece.tobytes() for piece in pieces)

    def write(
        self, key: bytes, parts: Sequence[memoryview], source: PeerRank, data: memoryview
    ) -> None:
        """Write the bytes that another rank has for this one to a block.

        Raises:
            ValueError: The number of bytes is wrong.
        """
        pieces = self._pieces(key, parts, self.own, source)
        if sum(piece.size for piece in pieces) != len(data):
            raise ValueError(f"{len(data)} bytes received for a part of a block")
        start = 0
        for piece in pieces:
            stop = start + piece.size
            piece[...] = np.frombuffer(data[start:stop], np.uint8).reshape(piece.shape)
            start = stop

    def has_part_of(self, source: PeerRank) -> bool:
        """Return whether this rank needs bytes of a rank of another server."""
        regions = (region for group in self._regions.values() for region in group)
        return any(_units_of(units, self.own, source) for units in {x.units for x in regions})

    def _pieces(
        self, key: bytes, parts: Sequence[memoryview], target: PeerRank, source: PeerRank
    ) -> list[NDArray[np.uint8]]:
        """Return views of the units that one rank has for the other. One of them is this rank."""
        group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
        pieces = []
        for region in self._regions.get(group, ()):
            moved = _units_of(region.units, target, source)
            own = TensorParallel(self.own.rank, self.own.size).part(region.units)
            if moved:
                units = region.view(parts, len(own))
                pieces.append(units[..., moved.start - own.start : moved.stop - own.start, :])
        return pieces


def _units_of(units: int, target: PeerRank, source: PeerRank) -> range:
    """Return the units of a region that one rank gets from another. Ranks with the same units take turns."""
    needed = TensorParallel(target.rank, target.size).part(units)
    parts = TensorParallel(0, source.size).parts(units)
    found = []
    for unit in needed:
        owners = [rank for rank, part in enumerate(parts) if unit in part]
        if owners[target.rank % len(owners)] == source.rank:
            found.append(unit)
    return range(found[0], found[-1] + 1) if found else range(0)
