"""Allocate, free, cache and evict KV-cache blocks."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Protocol

import numpy as np

from ...protocol.kv_events import MAX_BLOCK_CELLS, BlockState
from ..state.slots import as_array
from .block_lifetimes import BlockLifetimes
from .event_log import KVEventLog
from .gradual_list import GradualList

NULL_BLOCK: Final = 0
"""The number of the null block, which fills unused entries of block tables and is never allocated."""

FEW_BLOCKS: Final = 32
"""Number of blocks up to which references are counted block by block."""

MANY_BLOCKS: Final = 128
"""Number of blocks from which they are released and evicted by operations on arrays."""


class BlockListener(Protocol):
    """An observer of the prefix cache's contents, such as a KV connector or the log of KV events."""

    def blocks_cached(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Handle blocks that became findable. They may be copies of content that was cached before."""

    def block_evicted(self, key: bytes, block_id: int) -> None:
        """Handle the loss of cached content whose only block is about to be overwritten."""

    def copy_dropped(self, key: bytes, block_id: int) -> None:
        """Handle that one of several blocks with the same content is about to be overwritten.

        The others stay findable.
        """

    def blocks_removed(self, keys: Iterable[bytes]) -> None:
        """Handle content that became unfindable because it may be wrong, or is no longer needed."""

    def cache_cleared(self) -> None:
        """Handle the removal of all content."""


class BlockPool:
    """The blocks 1 … num_blocks - 1 of the KV cache, with reference counts and a map from content hashes to blocks.

    A block is held (`ref_counts` > 0) or free. A free block whose content is in the map is evictable. Free blocks
    without content are allocated first, then evictable ones, least recently freed first.

    Each hash maps to one block. Further blocks with the same content are its copies. When the block leaves the map, one
    of the copies replaces it. A free copy would be useless, so at most one of several equal blocks is evictable.
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
        self.listener: BlockListener | None = None
        """Receives every change of the cached content, or None."""
        # The event log copies these numbers. Copying a list would read each of its objects.
        self.ref_counts = array("q", [0]) * num_blocks
        self.lifetimes = BlockLifetimes(self.ref_counts)
        self.num_changes = 0
        """Increases whenever an allocation that failed might now succeed."""
        self._contents: GradualList[bytes | None] = GradualList([None] * num_blocks)
        """The content hash of each block."""
        self._block_of: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        self._blank = array("q", range(num_blocks - 1, NULL_BLOCK, -1))
        # Entry i of `_freed` has the serial number `_first_serial` + i. An entry becomes stale when its block is held
        # or freed again, so that holding an evictable block needs no search in `_freed`. A block that is neither held
        # nor evictable has the serial number -1.
        self._freed: deque[int] = deque()
        self._first_serial = 0
        self._serial_of = array("q", [-1]) * num_blocks
        self._num_evictable = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, including evictable ones."""
        return len(self._blank) + self._num_evictable

    @property
    def num_blank(self) -> int:
        """Number of free blocks without content, which are allocated before any is evicted."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Number of distinct contents in the cache."""
        return len(self._block_of)

    @property
    def num_copies(self) -> int:
        """Number of cached blocks whose content another cached block already has."""
        return sum(map(len, self._copies.values()))

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are held, from 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def describe_blocks(self, max_cells: int = MAX_BLOCK_CELLS) -> str:
        """Return the `BlockState` of every N-th block, for the smallest N that gives at most `max_cells`."""
        step = -(-(self.num_blocks - 1) // max_cells)
        cells = []
        for count, digest in zip(
            self.ref_counts[1::step], self._contents.items[1::step], strict=True
        ):
            if count:
                cells.append(BlockState.USED if count == 1 else BlockState.SHARED)
            else:
                cells.append(BlockState.EMPTY if digest is None else BlockState.CACHED)
        return "".join(cells)

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` free blocks, evicting cached ones only when no others are free.

        `count` must not exceed `num_free`.
        """
        blank = self._blank
        blocks = blank[: -count - 1 : -1].tolist()
        del blank[len(blank) - len(blocks) :]
        if len(blocks) < count:
            self._evict(count - len(blocks), blocks)
        if count < MANY_BLOCKS:
            ref_counts = self.ref_counts
            for block in blocks:
                ref_counts[block] = 1
        else:
            np.frombuffer(self.ref_counts, np.int64)[as_array(blocks)] = 1
        return blocks

    def adopt_blocks(self, blocks: Iterable[int]) -> None:
        """Add one reference to a block for each time that it occurs. Call this before allocating."""
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] += 1
        self._blank = array("q", [block for block in self._blank if not ref_counts[block]])

    def get_cached_block(self, digest: bytes) -> int | None:
        """Return the block with this content hash, or None."""
        return self._block_of.get(digest)

    def get_key(self, block: int) -> bytes | None:
        """Return the content hash under which a block is cached, or None."""
        return self._contents.items[block]

    def find_cached_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`."""
        if not hashes or hashes[0] not in self._block_of:
            return []
        if hashes[-1] in self._block_of:
            # Usually all others are cached too. This lookup is faster, and fails if one is not.
            try:
                return list(_get_items(self._block_of, hashes))
            except KeyError:
                pass
        found = list(map(self._block_of.get, hashes))
        if None in found:
            del found[found.index(None) :]
        return found  # type: ignore[return-value]

    def count_free(self, blocks: Sequence[int]) -> int:
        """Return how many of these cached blocks are free. Holding them lowers `num_free` by as much."""
        return _get_items(self.ref_counts, blocks).count(0) if blocks else 0

    def hold_blocks(self, blocks: Sequence[int], max_free: int) -> bool:
        """Add a reference to each of these different cached blocks.

        Return False, and change nothing, if more than `max_free` of them are free.
        """
        if len(blocks) > FEW_BLOCKS:
            indices = as_array(blocks)
            ref_counts = np.frombuffer(self.ref_counts, np.int64)
            counts = ref_counts[indices]
            num_free = len(blocks) - int(np.count_nonzero(counts))
            if num_free <= max_free:
                ref_counts[indices] = counts + 1
        else:
            num_free = self.count_free(blocks)
            if num_free <= max_free:
                for block in blocks:
                    self.ref_counts[block] += 1
        if num_free > max_free:
            return False
        if num_free:
            self._num_evictable -= num_free
            self.lifetimes.record_held()
        return True

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a request, given in the order of its tokens.

        The last blocks become evictable before the first ones, so that shared prefixes stay cached longest.
        """
        self.num_changes += 1
        num_evictable = self._num_evictable
        if len(blocks) < MANY_BLOCKS:
            self._release_each(blocks)
        else:
            self._release_many(blocks)
        if self._num_evictable > num_evictable:
            self.lifetimes.record_released(blocks)
            if len(self._freed) > 4 * self.num_blocks:
                self._drop_stale()

    def _release_each(self, blocks: Sequence[int]) -> None:
        ref_counts, hash_of, serial_of = self.ref_counts, self._contents.items, self._serial_of
        freed, copies = self._freed, self._copies
        first = serial = self._first_serial + len(freed)
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if not ref_counts[block]:
                digest = hash_of[block]
                if digest is None:
                    self._blank.append(block)
                elif copies and digest in copies:
                    self._drop_copy(block, digest)
                    self._blank.append(block)
                else:
                    serial_of[block] = serial
                    freed.append(block)
                    serial += 1
        self._num_evictable += serial - first

    def _release_many(self, blocks: Sequence[int]) -> None:
        indices = as_array(blocks)
        hash_of, copies, blank = self._contents.items, self._copies, self._blank
        ref_counts = np.frombuffer(self.ref_counts, np.int64)
        is_shared = int(ref_counts[indices].max()) > 1
        np.subtract.at(ref_counts, indices, 1)
        free = indices[ref_counts[indices] == 0].tolist()
        if is_shared:
            # A block of several of these requests becomes free with the first of its entries, which is released last.
            free = list(dict.fromkeys(free))
        evictable: list[int] = []
        for block in reversed(free):
            digest = hash_of[block]
            if digest is None:
                blank.append(block)
            elif copies and digest in copies:
                self._drop_copy(block, digest)
                blank.append(block)
            else:
                evictable.append(block)
        first = self._first_serial + len(self._freed)
        serials = np.frombuffer(self._serial_of, np.int64)
        serials[as_array(evictable)] = np.arange(first, first + len(evictable))
        self._freed += evictable
        self._num_evictable += len(evictable)

    def count_cached(self) -> int:
        """Return `num_cached` plus `num_copies`, recounted block by block to check the invariant."""
        return self.num_blocks - self._contents.items.count(None)

    def is_cached(self, digest: bytes) -> bool:
        """Return whether a block with this content hash is cached."""
        return digest in self._block_of

    def cache_blocks(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make full, held blocks findable. Blocks whose content is cached already become copies."""
        self.num_changes += 1
        block_of, hash_of = self._block_of, self._contents.items
        if self._contents.copy is not None:
            for block in blocks:
                self._contents.keep_item(block)
        for index, block in enumerate(blocks):
            digest = hashes[index]
            if block_of.setdefault(digest, block) == block:
                hash_of[block] = digest
            elif hash_of[block] is None:
                hash_of[block] = digest
                self._copies.setdefault(digest, []).append(block)
        if self.listener is not None:
            self.listener.blocks_cached(hashes, blocks)
        lifetimes = self.lifetimes
        lifetimes.num_until_sample -= len(blocks)
        if lifetimes.num_until_sample <= 0:
            lifetimes.sample_cached(blocks, hash_of)

    def uncache_blocks(self, hashes: Iterable[bytes]) -> None:
        """Make every block with this content unfindable, because the content may be wrong."""
        if self.listener is not None:
            hashes = list(hashes)
            self.listener.blocks_removed(hashes)
        for digest in hashes:
            first = self._block_of.pop(digest, None)
            if first is None:
                continue
            for block in (first, *self._copies.pop(digest, ())):
                self._contents.replace_item(block, None)
                self.lifetimes.stop_following(block)
                # This also makes entries stale that date from before the block was held.
                self._serial_of[block] = -1
                if not self.ref_counts[block]:
                    self._num_evictable -= 1
                    self._blank.append(block)
            if self._events is not None:
                self._events.record_removed(digest)

    def reset_cache(self) -> bool:
        """Remove all cached content. Return False, and change nothing, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._blank.extend(
            block for block, digest in enumerate(self._contents.items) if digest is not None
        )
        self._contents.replace_all([None] * self.num_blocks)
        self._block_of.clear()
        self._copies.clear()
        self._freed.clear()
        self._serial_of = array("q", [-1]) * self.num_blocks
        self._num_evictable = 0
        self.lifetimes.reset()
        if self._events is not None:
            self._events.record_cleared()
        if self.listener is not None:
            self.listener.cache_cleared()
        return True

    def rebuild(self) -> None:
        """Compute the fields that are not part of snapshots."""
        copies = set(chain.from_iterable(self._copies.values()))
        self._block_of = {
            digest: block
            for block, digest in enumerate(self._contents.items)
            if digest is not None and block not in copies
        }
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Remove the stale entries of `_freed`."""
        serials = np.frombuffer(self._serial_of, np.int64)
        is_evictable = (serials >= 0) & (np.frombuffer(self.ref_counts, np.int64) == 0)
        evictable = is_evictable.nonzero()[0]
        evictable = evictable[serials[evictable].argsort()]
        self._freed = deque(evictable.tolist())
        self._first_serial = 0
        serials[evictable] = np.arange(len(evictable))

    def _evict(self, count: int, blocks: list[int]) -> None:
        """Evict the `count` least recently freed cached blocks and append them to `blocks`."""
        hash_of, block_of, copies = self._contents.items, self._block_of, self._copies
        gradual = self._contents if self._contents.copy is not None else None
        is_watched = (
            self._on_evict is not None or self._events is not None or self.listener is not None
        )
        evicted = self._pop_each(count) if count < MANY_BLOCKS else self._pop_many(count)
        for block in evicted:
            digest = hash_of[block]
            assert digest is not None
            if copies and digest in copies:
                self._drop_copy(block, digest)
                continue
            del block_of[digest]
            if gradual is not None:
                gradual.keep_item(block)
            hash_of[block] = None
            if is_watched:
                self._report_evicted(digest, block)
        blocks += evicted
        self._num_evictable -= count
        self.lifetimes.record_evicted(blocks)

    def _pop_each(self, count: int) -> list[int]:
        """Remove and return the least recently freed evictable blocks."""
        serial_of, ref_counts, freed = self._serial_of, self.ref_counts, self._freed
        serial = self._first_serial
        popped: list[int] = []
        while len(popped) < count:
            block = freed.popleft()
            if serial_of[block] == serial and not ref_counts[block]:
                popped.append(block)
                serial_of[block] = -1
            serial += 1
        self._first_serial = serial
        return popped

    def _pop_many(self, count: int) -> list[int]:
        """Do the same as `_pop_each`."""
        serials = np.frombuffer(self._serial_of, np.int64)
        ref_counts = np.frombuffer(self.ref_counts, np.int64)
        popped: list[int] = []
        while len(popped) < count:
            entries = as_array([self._freed.popleft() for _ in range(count - len(popped))])
            first, self._first_serial = self._first_serial, self._first_serial + len(entries)
            is_current = serials[entries] == np.arange(first, self._first_serial)
            evictable = entries[is_current & (ref_counts[entries] == 0)]
            serials[evictable] = -1
            popped += evictable.tolist()
        return popped

    def _report_evicted(self, digest: bytes, block: int) -> None:
        if self._on_evict is not None:
            self._on_evict(digest, block)
        if self._events is not None:
            self._events.record_removed(digest)
        if self.listener is not None:
            self.listener.block_evicted(digest, block)

    def _drop_copy(self, block: int, digest: bytes) -> None:
        """Remove one of several blocks with the same content from the cache. The content stays findable."""
        copies = self._copies[digest]
        if self._block_of[digest] == block:
            self._block_of[digest] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[digest]
        self._contents.replace_item(block, None)
        self._serial_of[block] = -1
        self.lifetimes.stop_following(block)
        if self.listener is not None:
            self.listener.copy_dropped(digest, block)


def _get_items(container: Any, keys: Sequence[Any]) -> tuple[Any, ...]:
    """Return `container[key]` for each of at least one key, without a Python operation per key."""
    items = itemgetter(*keys)(container)
    return items if len(keys) > 1 else (items,)
