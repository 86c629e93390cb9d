"""The parts of a KV-cache block that tensor-parallel ranks divide, and the parts that ranks of other sizes lack.

A region is an array within a block, such as the keys of one layer. One of its axes counts units, such as heads, of
which each rank has a consecutive part. If there are fewer units than ranks, several ranks have the same one. So the
bytes that a rank of one size has for a rank of another size follow from the two ranks and sizes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.block_hash import HASH_BYTES
from ..layers.parallel.tensor_parallel import TensorParallel

_INFINITY: Final[dict[str, np.unsignedinteger[Any]]] = {
    "float32": np.uint32(0x7F80_0000),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
    "float8_e4m3fn": np.uint8(0x7F),
}
"""The bits that are all set in NaN and infinity, and in no finite number."""


class Numbers(msgspec.Struct, frozen=True):
    """The floating-point numbers in a unit: the last `num_bytes` of every `period` bytes, or all if these are 0."""

    dtype: str
    period: int = 0
    num_bytes: int = 0


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
        numbers: The floating-point numbers in a unit; None if it has none.
    """

    name: str
    group: int
    page: int
    offset: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    units: int
    unit_bytes: int
    numbers: Numbers | None = None

    def has_non_finite(self, blocks_kB: NDArray[np.uint8], num_units: int) -> NDArray[np.bool]:
        """Return for each of k blocks whether NaN or infinity is in the region, given their parts of its tensor."""
        if self.numbers is None:
            return np.zeros(len(blocks_kB), np.bool)
        mask = _INFINITY[self.numbers.dtype]
        period = self.numbers.period or self.unit_bytes
        num_bytes = self.numbers.num_bytes or period
        view = np.lib.stride_tricks.as_strided(
            blocks_kB[:, self.offset + period - num_bytes :],
            (len(blocks_kB), *self.counts, num_units, self.unit_bytes // period, num_bytes),
            (blocks_kB.strides[0], *self.strides, self.unit_bytes, period, 1),
        )
        numbers = view.view(mask.dtype)
        found: NDArray[np.bool] = ((numbers & mask) == mask).any(axis=tuple(range(1, view.ndim)))
        return found

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

    def find_non_finite(
        self, group: int, read_page: Callable[[int], NDArray[np.uint8]]
    ) -> NDArray[np.bool]:
        """Return for each of k blocks of a group whether it contains NaN or infinity.

        Args:
            group: The KV-cache group of the blocks.
            read_page: Returns the parts of the blocks in a cache tensor, uint8 [k, P].
        """
        by_page: dict[int, list[Region]] = {}
        for region in self._regions.get(group, ()):
            by_page.setdefault(region.page, []).append(region)
        found = np.zeros(1, np.bool)
        for page, regions in by_page.items():
            parts_kP = read_page(page)
            for region in regions:
                own = TensorParallel(self.own.rank, self.own.size).part(region.units)
                found = found | region.has_non_finite(parts_kP, len(own))
        return found

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
