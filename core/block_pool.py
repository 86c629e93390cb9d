"""KV-cache blocks: reference counts, the order in which free ones are reused, and the prefix map."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from .block_lifetimes import BlockLifetimes
from .kv_event_log import KVEventLog

NULL_BLOCK: Final = 0
"""Never allocated: fills unused places of block tables."""


class BlockPool:
    """Blocks 1 … num_blocks - 1.

    A block is held (`ref_counts` > 0) or free. A free block whose content is still in the prefix map is
    evictable: it is reused last, least recently freed first. Each hash maps to one block; a
    second block filled with the same content stays out of the map.
    """

    def __init__(
        self,
        num_blocks: int,
        events: KVEventLog | None = None,
        on_evict: Callable[[bytes, int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._events = events
        self._on_evict = on_evict
        self.ref_counts = [0] * num_blocks
        self.lifetimes = BlockLifetimes(self.ref_counts)
        self.num_openings = 0
        """Grows whenever an allocation that failed before might succeed now."""
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # Entry i of `_freed` has the serial number `_first_serial` + i; it is stale once its block was held
        # or freed again. So holding an evictable block costs nothing here.
        self._freed: deque[int] = deque()
        self._first_serial = 0
        self._serial_of = [-1] * num_blocks
        self._num_evictable = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_evictable

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int]:
        """Hold `count` free blocks, the never cached first. `count` must not exceed `num_free`."""
        blank = self._blank
        blocks = blank[: -count - 1 : -1]
        del blank[len(blank) - len(blocks) :]
        if len(blocks) < count:
            self._evict(count - len(blocks), blocks)
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def adopt(self, blocks: Iterable[int]) -> None:
        """Take the first references, one each time that a block is named, while every block is blank."""
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] += 1
        self._blank = [block for block in self._blank if not ref_counts[block]]

    def lookup(self, digest: bytes) -> int | None:
        """The block with that content."""
        return self._block_of.get(digest)

    def key_of(self, block: int) -> bytes | None:
        """What the block is found by."""
        return self._hash_of[block]

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest prefix of `hashes`."""
        if not hashes or hashes[0] not in self._block_of:
            return []
        found = list(map(self._block_of.get, hashes))
        if None in found:
            del found[found.index(None) :]
        return found  # type: ignore[return-value]

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of these found blocks are free, so that holding them takes from `num_free`."""
        return list(map(self.ref_counts.__getitem__, blocks)).count(0)

    def hold(self, blocks: Sequence[int], num_free: int) -> None:
        """Take a reference on found blocks, `num_free` of which are free."""
        self._num_evictable -= num_free
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] += 1
        if num_free:
            self.lifetimes.held()

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference on each of a request's blocks, given in the order of its tokens.

        Tails become evictable before heads.
        """
        self.num_openings += 1
        ref_counts, hash_of, serial_of = self.ref_counts, self._hash_of, self._serial_of
        freed = self._freed
        first = serial = self._first_serial + len(freed)
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if not ref_counts[block]:
                if hash_of[block] is None:
                    self._blank.append(block)
                else:
                    serial_of[block] = serial
                    freed.append(block)
                    serial += 1
        if serial > first:
            self._num_evictable += serial - first
            self.lifetimes.released(blocks)
            if len(freed) > 4 * self.num_blocks:
                self._drop_stale()

    def count_cached(self) -> int:
        """`num_cached`, counted block by block."""
        return self.num_blocks - self._hash_of.count(None)

    def is_cached(self, digest: bytes) -> bool:
        return digest in self._block_of

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make full blocks findable, unless another block has the same content already."""
        self.num_openings += 1
        block_of, hash_of = self._block_of, self._hash_of
        for index, block in enumerate(blocks):
            digest = hashes[index]
            if block_of.setdefault(digest, block) == block:
                hash_of[block] = digest
        lifetimes = self.lifetimes
        lifetimes.num_until_sample -= len(blocks)
        if lifetimes.num_until_sample <= 0:
            lifetimes.sample(blocks, hash_of)

    def uncache(self, hashes: Iterable[bytes]) -> None:
        """Make blocks unfindable: their content is not to be trusted."""
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                continue
            self._forget(block, digest)
            self.lifetimes.forgotten(block)
            # Also of a held one, which is freed as a blank: an entry from before it was held must not count again.
            self._serial_of[block] = -1
            if not self.ref_counts[block]:
                self._num_evictable -= 1
                self._blank.append(block)

    def reset(self) -> bool:
        """Forget every cached block. Does nothing and returns False while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._blank += [block for block, digest in enumerate(self._hash_of) if digest is not None]
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._freed.clear()
        self._num_evictable = 0
        self.lifetimes.reset()
        if self._events is not None:
            self._events.cleared()
        return True

    def _drop_stale(self) -> None:
        serial_of, ref_counts = self._serial_of, self.ref_counts
        serials = enumerate(self._freed, self._first_serial)
        fresh = [
            block
            for serial, block in serials
            if serial_of[block] == serial and not ref_counts[block]
        ]
        self._freed.clear()
        self._freed += fresh
        for serial, block in enumerate(fresh, self._first_serial):
            serial_of[block] = serial

    def _evict(self, count: int, blocks: list[int]) -> None:
        """Move the `count` least recently freed cached blocks out of the cache to the end of `blocks`."""
        serial_of, ref_counts, freed = self._serial_of, self.ref_counts, self._freed
        hash_of, block_of = self._hash_of, self._block_of
        is_watched = self._on_evict is not None or self._events is not None
        self._num_evictable -= count
        serial = self._first_serial
        while count:
            block = freed.popleft()
            if serial_of[block] == serial and not ref_counts[block]:
                digest = hash_of[block]
                assert digest is not None
                del block_of[digest]
                hash_of[block] = None
                blocks.append(block)
                count -= 1
                if is_watched:
                    self._tell_evicted(digest, block)
            serial += 1
        self._first_serial = serial
        self.lifetimes.evicted(blocks)

    def _tell_evicted(self, digest: bytes, block: int) -> None:
        if self._on_evict is not None:
            self._on_evict(digest, block)
        if self._events is not None:
            self._events.removed(digest)

    def _forget(self, block: int, digest: bytes) -> None:
        del self._block_of[digest]
        self._hash_of[block] = None
        if self._events is not None:
            self._events.removed(digest)
