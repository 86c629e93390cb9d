"""The block tables of running requests, by KV-cache group and slot."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, repeat, takewhile
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ...protocol.arrays import Int64Array, int32_bytes
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ..state.request import Request
from ..state.slots import SlotArray, as_array
from .block_pool import NULL_BLOCK, BlockPool
from .cached_prefix import CachedPrefix
from .windows import Window, make_windows

_MAX_DEFERRED: Final = 64
"""Maximum number of steps after which deferred blocks are appended to the tables."""

RequestBlocks: TypeAlias = tuple[list[int], ...]
"""The blocks of one request in each group, in the order of its tokens."""


KeepState: TypeAlias = Callable[[int, int, int, int], None]
"""A function that is called with a slot, a group, a number of full blocks and the last of these blocks."""


class Growth(NamedTuple):
    """Blocks to add to the tables of some slots.

    `slots[i]` gets `counts[i]` > 0 blocks in each group; `total` is the number over all slots and groups.
    """

    slots: SlotArray
    counts: Int64Array
    total: int


class BlockTables:
    """One block table per KV-cache group and slot. Entries without a block contain the null block.

    After a request got its slot, every change of its tables is sent to the workers.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[KVCacheGroup, ...],
        block_size: int,
        max_num_seqs: int,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks: list[list[list[int]]] = [[[] for _ in range(max_num_seqs)] for _ in groups]
        kinds = [group.kind for group in groups]
        self.is_simple = kinds == [AttentionKind.FULL]
        """True if the only group is full attention."""
        self._state_groups = [
            i for i, kind in enumerate(kinds) if kind is AttentionKind.STATE_SPACE
        ]
        self._growing_group = next(
            i for i, kind in enumerate(kinds) if kind is not AttentionKind.CROSS
        )
        self._cross_groups = [i for i, kind in enumerate(kinds) if kind is AttentionKind.CROSS]
        self._token_groups = [
            i
            for i in range(len(groups))
            if i not in self._state_groups and i not in self._cross_groups
        ]
        self._sources = [groups[i] for i in self._cross_groups]
        self._full_group = kinds.index(AttentionKind.FULL) if AttentionKind.FULL in kinds else None
        self._windows = make_windows(groups, block_size, max_num_seqs)
        self.has_windows = bool(self._windows)
        self._capacity: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._deferred: list[tuple[list[int], list[int]]] = []
        """Blocks that are not in the tables yet: (slots, one new block for each), one entry per step."""
        self._dropped: list[tuple[int, int, int]] = []
        self._updates = b""

    @property
    def blocks(self) -> list[list[list[int]]]:
        """The table of each group and slot."""
        if self._deferred:
            self._flush()
        return self._blocks

    # Allocating and freeing a slot

    def count_new(self, request: Request, prefix: CachedPrefix, num_blocks: int) -> int:
        """Return how many blocks to allocate for a request of `num_blocks` blocks, given its cached prefix.

        Blocks of the prefix that must be loaded from the CPU are included, because they need a place.
        """
        num_more = num_blocks - prefix.num_blocks
        if self.is_simple:
            return num_more + len(prefix.loads)
        return (
            num_more * len(self._token_groups)
            + len(prefix.loads)
            + (len(self._state_groups) if num_more else 0)
            + sum(self._count_cross_blocks(request))
        )

    def _count_cross_blocks(self, request: Request) -> list[int]:
        """Return the number of blocks of each cross-attention group."""
        sizes = (
            request.source_size if group.is_optional else group.size for group in self._sources
        )
        return [-(-size // self._block_size) for size in sizes]

    def build_tables(
        self, request: Request, prefix: CachedPrefix, num_blocks: int, new: list[int]
    ) -> RequestBlocks:
        """Return the tables of a request with a cached prefix and newly allocated blocks."""
        if self.is_simple:
            return (prefix.blocks[0] + new,)
        tables = [
            [NULL_BLOCK] * (prefix.num_blocks - len(found)) + found for found in prefix.blocks
        ]
        num_more = num_blocks - prefix.num_blocks
        start = 0
        for group in self._token_groups:
            tables[group] += new[start : start + num_more]
            start += num_more
        for group in self._state_groups if num_more else ():
            tables[group] += [NULL_BLOCK] * (num_more - 1) + new[start : start + 1]
            start += 1
        counts = self._count_cross_blocks(request)
        for group, count in zip(self._cross_groups, counts, strict=True):
            tables[group] = new[start : start + count]
            start += count
        return tuple(tables)

    def assign_simple_tables(self, slots: Sequence[int], tables: Sequence[list[int]]) -> None:
        """Assign their tables to several slots if full attention is the only group."""
        (blocks,) = self.blocks
        for slot, table in zip(slots, tables, strict=True):
            blocks[slot] = table
        num_blocks = as_array(list(map(len, tables)))
        self._capacity[as_array(list(slots))] = num_blocks * self._block_size

    def assign_tables(self, slot: int, tables: RequestBlocks, prefix: CachedPrefix) -> None:
        """Assign tables to the slot of a request."""
        self._capacity[slot] = len(tables[self._growing_group]) * self._block_size
        for rows, table in zip(self.blocks, tables, strict=True):
            rows[slot] = table
        for window in self._windows:
            num_found = len(prefix.blocks[window.groups[0]])
            window.first_held[slot] = prefix.num_blocks - num_found

    def get_tables(self, slot: int) -> RequestBlocks:
        """Return the tables of a slot, one per group."""
        return tuple([tables[slot] for tables in self.blocks])

    def free_slots(self, slots: list[int]) -> None:
        """Release all blocks of these slots, in the order of `slots`."""
        self._capacity[as_array(slots)] = 0
        for tables in self.blocks:
            released: list[int] = []
            for slot in reversed(slots):
                released += tables[slot]
                tables[slot] = []
            if not self.is_simple:
                released = [block for block in released if block != NULL_BLOCK]
            self._pool.release_blocks(released)
        if self._dropped:
            self._dropped = [place for place in self._dropped if place[1] not in slots]

    # Growth

    @property
    def capacity(self) -> Int64Array:
        """Number of tokens that the blocks of each slot can hold."""
        if self._deferred:
            self._flush()
        return self._capacity

    def _flush(self) -> None:
        """Append the deferred blocks to their tables.

        This is not done in every step, because the tables of many slots are spread over much memory.
        """
        (tables,) = self._blocks
        put_off, self._deferred = self._deferred, []
        for slots, blocks in put_off:
            for slot, block in zip(slots, blocks, strict=True):
                tables[slot].append(block)
        grown = list(set(chain.from_iterable(slots for slots, _ in put_off)))
        num_blocks = as_array([len(tables[slot]) for slot in grown])
        self._capacity[as_array(grown)] = num_blocks * self._block_size

    def limit_growth(
        self, slots: SlotArray, num_certain: Int64Array, num_tokens: Int64Array
    ) -> Int64Array:
        """Limit each slot to one more block if the model has recurrent layers; `num_certain` tokens are always allowed.

        A slot that grows by several blocks gets a state block only for the last of them. If drafts are rejected, it
        would need the earlier ones as well.
        """
        if not self._state_groups:
            return num_tokens
        most = np.minimum(num_tokens, self.capacity[slots] + self._block_size)
        return np.maximum(most, num_certain)

    def plan_growth(self, slots: SlotArray, num_tokens: Int64Array) -> Growth:
        """Return the blocks that `slots` lack to hold `num_tokens[i]` tokens each."""
        missing = num_tokens - self.capacity[slots]
        rows = (missing > 0).nonzero()[0]
        counts = -(-missing[rows] // self._block_size)
        total = int(counts.sum()) if len(rows) else 0
        if not self.is_simple:
            total = total * len(self._token_groups) + len(rows) * len(self._state_groups)
        return Growth(slots[rows], counts, total)

    def apply_growth(self, growth: Growth) -> None:
        """Allocate a planned growth. The pool must have enough free blocks, and the step must send `take_updates`."""
        if not growth.total:
            return
        if self.is_simple:
            self._grow_simple(growth)
            return
        updates: list[tuple[int, int, int, int]] = []
        blocks = iter(self._pool.allocate_blocks(growth.total))
        num_held = self.capacity[growth.slots] // self._block_size
        self._capacity[growth.slots] = (num_held + growth.counts) * self._block_size
        rows = zip(growth.slots.tolist(), num_held.tolist(), growth.counts.tolist(), strict=True)
        for slot, start, count in rows:
            updates += [
                (group, slot, index, next(blocks))
                for group in self._token_groups
                for index in range(start, start + count)
            ]
            last = start + count - 1
            updates += [(group, slot, last, next(blocks)) for group in self._state_groups]
            for group, tables in enumerate(self.blocks):
                if group not in self._cross_groups:
                    tables[slot] += [NULL_BLOCK] * count
        for group, slot, index, block in updates:
            self.blocks[group][slot][index] = block
        self._updates = int32_bytes(updates)

    def grow_by_one(self, slots: list[int], num_held: list[int]) -> bytes:
        """Allocate one more block for each of these slots. Requires that full attention is the only group.

        Return the table updates as int32 rows (group, slot, index, block).
        """
        blocks = self._pool.allocate_blocks(len(slots))
        self._deferred.append((slots, blocks))
        if len(self._deferred) == _MAX_DEFERRED:
            self._flush()
        rows = zip(repeat(0), slots, num_held, blocks)
        return array("i", list(chain.from_iterable(rows))).tobytes()

    def _grow_simple(self, growth: Growth) -> None:
        slots, counts, total = growth
        num_held = self.capacity[slots] // self._block_size
        if total == len(slots):
            self._updates = self.grow_by_one(slots.tolist(), num_held.tolist())
            return
        blocks = self._pool.allocate_blocks(total)
        updates = np.empty((total, 4), np.int32)
        updates[:, 0] = 0
        updates[:, 3] = blocks
        self._capacity[slots] = (num_held + counts) * self._block_size
        first = np.cumsum(counts) - counts
        num_held = np.repeat(num_held - first, counts) + np.arange(total)
        slots = np.repeat(slots, counts)
        updates[:, 1] = slots
        updates[:, 2] = num_held
        (tables,) = self.blocks
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            tables[slot].append(block)
        self._updates = updates.tobytes()

    def advance_windows(
        self, slots: SlotArray, num_computed: Int64Array, keep_state: KeepState
    ) -> None:
        """Free the blocks of sliding-window and state groups that no token after the computed ones needs.

        `keep_state` is called before the last full block with a state of a slot is freed.
        """
        for window in self._windows:
            has_states = window.groups[0] in self._state_groups
            for slot, start, end in window.pop_passed_blocks(slots, num_computed):
                if has_states:
                    for group in window.groups:
                        keep_state(slot, group, end, self.blocks[group][slot][end - 1])
                self._drop(window, slot, start, end)

    def _drop(self, window: Window, slot: int, start: int, end: int) -> None:
        for group in window.groups:
            table = self.blocks[group][slot]
            held = [index for index in range(start, end) if table[index] != NULL_BLOCK]
            self._pool.release_blocks([table[index] for index in held])
            for index in held:
                table[index] = NULL_BLOCK
                self._dropped.append((group, slot, index))

    def take_updates(self) -> bytes:
        """Return the table changes since the last call as int32 rows (group, slot, index, block)."""
        updates, self._updates = self._updates, b""
        if self._dropped:
            updates += int32_bytes([(*place, NULL_BLOCK) for place in self._dropped])
            self._dropped = []
        return updates

    # Counting

    def count_freed(self, slots: Sequence[int], kept: set[int]) -> int:
        """Return how many blocks freeing these slots would return to the pool, if the blocks `kept` stay held."""
        held = Counter(
            chain.from_iterable(tables[slot] for tables in self.blocks for slot in slots)
        )
        del held[NULL_BLOCK]
        ref_counts = self._pool.ref_counts
        return sum(
            count == ref_counts[block] and block not in kept for block, count in held.items()
        )

    def count_common_blocks(self, slots: SlotArray) -> int:
        """Return the length of the table prefix that all these slots share in the full-attention group, in blocks."""
        ref_counts, num_slots = self._pool.ref_counts, len(slots)
        if num_slots < 2 or self._full_group is None:
            return 0
        tables = self.blocks[self._full_group]
        if ref_counts[tables[slots[0]][0]] < num_slots:
            return 0
        rows = [tables[slot] for slot in slots.tolist()]
        # A prefix common to the smallest and the largest table is common to all tables, which lie between them.
        ends = zip(min(rows), max(rows), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
