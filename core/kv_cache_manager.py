"""Which blocks each running request holds, and which prefixes are found in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, groupby, takewhile
from typing import NamedTuple, TypeAlias

import numpy as np

from ..protocol.arrays import Int32Array, Int64Array, int32_bytes, int32_view
from ..protocol.block_hash import PlacedInput, hash_blocks
from ..protocol.config import PreemptionMode
from ..protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from .block_pool import NULL_BLOCK, BlockPool
from .cached_prefix import ON_HOST, CachedPrefix, find_cached_prefix, group_key, group_keys
from .host_tier import HostTier
from .kv_event_log import KVEventLog
from .request import Request
from .slots import SlotArray, Slots
from .windows import Window, windows_of

HashBlocks: TypeAlias = Callable[[Int32Array, int, bytes, Sequence[PlacedInput]], bytes]
"""`block_hash.hash_blocks`, or what stands for it where there are no tokens."""

BlockTables: TypeAlias = tuple[list[int], ...]
"""The blocks of one request in each group, in the order of its tokens."""


class Growth(NamedTuple):
    """Blocks of tokens that some slots need in addition: `slots[i]` needs `counts[i]` > 0 of them.

    `total` counts them in all groups.
    """

    slots: SlotArray
    counts: Int64Array
    total: int


class Prefix(NamedTuple):
    """The computed tokens that a waiting request can begin with; a reserved prefix is held for the request already."""

    blocks: CachedPrefix
    num_tokens: int
    is_reserved: bool = False

    @property
    def num_cached_blocks(self) -> int:
        """The first blocks that others can find, too."""
        return 0 if self.is_reserved else self.blocks.num_present


class KVCacheManager:
    """Blocks by group and slot over one `BlockPool`. Allocation is all or nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        slots: Slots,
        enable_prefix_caching: bool,
        groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
        num_host_blocks: int = 0,
        preemption_mode: PreemptionMode = PreemptionMode.AUTO,
        events: KVEventLog | None = None,
        hash_blocks: HashBlocks = hash_blocks,
    ) -> None:
        self.host = HostTier(num_host_blocks) if num_host_blocks else None
        self._preemption_mode = preemption_mode
        self._unwanted: set[int] = set()
        self.pool = BlockPool(num_blocks, events, self._keep_evicted if self.host else None)
        self._events = events
        self._hash_blocks = hash_blocks
        self._slots = slots
        max_num_seqs = len(slots.requests)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = groups
        self.blocks: list[list[list[int]]] = [[[] for _ in range(max_num_seqs)] for _ in groups]
        """The blocks of each group and slot in the order of its tokens, the null block where none is needed."""
        self.reserved: dict[int, list[int]] = {}
        """Blocks that are held for a transfer instead of by a slot, by its id; there is one group then."""
        kinds = [group.kind for group in groups]
        self._is_simple = kinds == [AttentionKind.FULL]
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
        self._num_cross_blocks = [-(-groups[i].size // block_size) for i in self._cross_groups]
        self._windows = windows_of(groups, block_size, max_num_seqs)
        self._no_prefix = CachedPrefix(0, ([],) * len(groups))
        self._full_group = kinds.index(AttentionKind.FULL) if AttentionKind.FULL in kinds else None
        self.has_windows = bool(self._windows)
        self._dropped: list[tuple[int, int, int]] = []
        self._new_states: list[tuple[int, bytes]] = []
        self._updates = b""
        self._capacity: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_cached_blocks = [0] * max_num_seqs

    def find_prefix(self, request: Request) -> Prefix:
        """The longest known prefix, findable or reserved."""
        found = self.find_computed_blocks(request)
        num_tokens = found.num_blocks * self.block_size
        if request.num_reserved_tokens > num_tokens:
            blocks = self.reserved[request.transfer_id]
            # The last token is computed again for what comes after it.
            num_tokens = min(request.num_reserved_tokens, request.num_tokens - 1)
            return Prefix(CachedPrefix(len(blocks), (blocks,)), num_tokens, is_reserved=True)
        return Prefix(found, num_tokens)

    def find_computed_blocks(self, request: Request) -> CachedPrefix:
        """The cached blocks of the longest known prefix, which leaves at least one token to compute."""
        limit = (request.num_tokens - 1) // self.block_size
        if not limit or not self.reads_cache_for(request):
            return self._no_prefix
        digests = request.block_hashes[:limit]
        if self._is_simple and self.host is None:
            found = self.pool.find(digests)
            return CachedPrefix(len(found), (found,)) if found else self._no_prefix
        return find_cached_prefix(
            self.pool,
            self.groups,
            self.block_size,
            digests,
            self.pool.lookup if self.host is None else self._lookup,
        )

    def _lookup(self, key: bytes) -> int | None:
        """Where a block's content is; the host is asked last."""
        block = self.pool.lookup(key)
        if block is None and self.host is not None and self.host.find(key) is not None:
            return ON_HOST
        return block

    def reads_cache_for(self, request: Request) -> bool:
        """Prompt log-probabilities need the whole prompt to be computed, once."""
        return (
            self.enable_prefix_caching
            and bool(request.root_hash)
            and (request.params.prompt_logprobs is None or request.has_sampled)
        )

    def allocate(self, prefix: CachedPrefix, num_tokens: int) -> BlockTables | None:
        """Hold blocks for `num_tokens` tokens, beginning with the found ones; None if they do not fit.

        Returns the block table of each group.
        """
        pool = self.pool
        num_blocks = -(-num_tokens // self.block_size)
        num_new = self._count_new(prefix, num_blocks)
        found = self._present_blocks(prefix) if prefix.num_blocks else []
        num_revived = pool.count_free(found) if found else 0
        if num_new + num_revived > pool.num_free:
            return None
        if found:
            pool.hold(found, num_revived)
        if self.host is not None:
            self._unwanted.difference_update(found)
            self.host.reserve(load.key for load in prefix.loads)
        new = pool.allocate(num_new)
        if self.host is not None:
            for load in prefix.loads:
                block = prefix.blocks[load.group][load.position] = new.pop()
                self.host.load(load.key, block)
        if self._is_simple:
            return (prefix.blocks[0] + new,)
        return self._lay_out(prefix, num_blocks, new)

    def _count_new(self, prefix: CachedPrefix, num_blocks: int) -> int:
        """Blocks to allocate for a request of `num_blocks`, the found ones on the host included."""
        num_more = num_blocks - prefix.num_blocks
        if self._is_simple:
            return num_more + len(prefix.loads)
        return (
            num_more * len(self._token_groups)
            + len(prefix.loads)
            + len(self._state_groups)
            + sum(self._num_cross_blocks)
        )

    def _present_blocks(self, prefix: CachedPrefix) -> list[int]:
        """The found blocks that are in the workers' cache."""
        if self._is_simple and not prefix.loads:
            return prefix.blocks[0]
        return [block for block in chain.from_iterable(prefix.blocks) if block != ON_HOST]

    def _lay_out(self, prefix: CachedPrefix, num_blocks: int, new: list[int]) -> BlockTables:
        """The block tables of a request that was found a prefix and given new blocks."""
        tables = [
            [NULL_BLOCK] * (prefix.num_blocks - len(found)) + found for found in prefix.blocks
        ]
        num_more = num_blocks - prefix.num_blocks
        start = 0
        for group in self._token_groups:
            tables[group] += new[start : start + num_more]
            start += num_more
        for group in self._state_groups:
            tables[group] += [NULL_BLOCK] * (num_more - 1) + new[start : start + 1]
            start += 1
        for group, count in zip(self._cross_groups, self._num_cross_blocks, strict=True):
            tables[group] = new[start : start + count]
            start += count
        return tuple(tables)

    def count_needed(
        self, prefix: CachedPrefix, num_tokens: int, without: Sequence[int] = ()
    ) -> int:
        """How many free blocks `allocate` would take, less those that vacating some slots would free."""
        needed = self._count_new(prefix, -(-num_tokens // self.block_size))
        found = self._present_blocks(prefix)
        needed += self.pool.count_free(found)
        if without:
            held = Counter(
                chain.from_iterable(tables[slot] for tables in self.blocks for slot in without)
            )
            del held[NULL_BLOCK]
            kept = set(found)
            needed -= sum(
                count == self.pool.ref_counts[block] and block not in kept
                for block, count in held.items()
            )
        return needed

    def assign(
        self,
        request: Request,
        tables: BlockTables,
        prefix: Prefix,
        num_tokens: int,
    ) -> None:
        """Give a request its blocks, the first `num_tokens` tokens of which will be computed."""
        slot = request.slot
        for group, table in enumerate(tables):
            self.blocks[group][slot] = table
        for window in self._windows:
            num_found = len(prefix.blocks.blocks[window.groups[0]])
            window.first_held[slot] = prefix.blocks.num_blocks - num_found
        self._capacity[slot] = len(tables[self._growing_group]) * self.block_size
        self._num_cached_blocks[slot] = prefix.num_cached_blocks
        self.cache_blocks(request, num_tokens)

    def begin_step(self, slots: SlotArray, *, may_be_rejected: bool) -> None:
        """Free the blocks of windowed groups that no token still to be computed in `slots` will see.

        Tokens that steps in flight compute count as computed, unless they may be rejected.
        """
        self._cache_states()
        num_computed = self._slots.num_computed_tokens[slots]
        if may_be_rejected:
            num_computed = np.minimum(num_computed, self._slots.num_known_tokens(slots) - 1)
        for window in self._windows:
            for slot, start, end in window.advance(slots, num_computed):
                self._drop(window, slot, start, end)

    def _drop(self, window: Window, slot: int, start: int, end: int) -> None:
        for group in window.groups:
            table = self.blocks[group][slot]
            held = [index for index in range(start, end) if table[index] != NULL_BLOCK]
            self.pool.release([table[index] for index in held])
            for index in held:
                table[index] = NULL_BLOCK
                self._dropped.append((group, slot, index))

    def plan_growth(self, slots: SlotArray, num_tokens: Int64Array) -> Growth:
        """What `slots` lack to hold `num_tokens` tokens each."""
        missing = num_tokens - self._capacity[slots]
        rows = (missing > 0).nonzero()[0]
        counts = -(-missing[rows] // self.block_size)
        total = int(counts.sum()) if len(rows) else 0
        if not self._is_simple:
            total = total * len(self._token_groups) + len(rows) * len(self._state_groups)
        return Growth(slots[rows], counts, total)

    def take_block_updates(self) -> bytes:
        """Int32 rows (group, slot, index, block): what has changed in block tables since the last call."""
        updates, self._updates = self._updates, b""
        if self._dropped:
            updates += int32_bytes([(*place, NULL_BLOCK) for place in self._dropped])
            self._dropped = []
        return updates

    def grow(self, growth: Growth) -> None:
        """Carry out a planned growth that fits. The step in the making must `take_block_updates`."""
        if not growth.total:
            return
        if self._is_simple:
            self._grow_simple(growth)
            return
        updates: list[tuple[int, int, int, int]] = []
        blocks = iter(self.pool.allocate(growth.total))
        num_held = self._capacity[growth.slots] // self.block_size
        self._capacity[growth.slots] = (num_held + growth.counts) * self.block_size
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

    def _grow_simple(self, growth: Growth) -> None:
        slots, counts, total = growth
        blocks = self.pool.allocate(total)
        updates = np.empty((total, 4), np.int32)
        updates[:, 0] = 0
        updates[:, 3] = blocks
        num_held = self._capacity[slots] // self.block_size
        self._capacity[slots] = (num_held + counts) * self.block_size
        if total > len(slots):
            first = np.cumsum(counts) - counts
            num_held = np.repeat(num_held - first, counts) + np.arange(total)
            slots = np.repeat(slots, counts)
        updates[:, 1] = slots
        updates[:, 2] = num_held
        (tables,) = self.blocks
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            tables[slot].append(block)
        self._updates = updates.tobytes()

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full, hashed blocks among the request's first `num_tokens` tokens findable."""
        if not self._caches(request):
            return
        slot = request.slot
        start = self._num_cached_blocks[slot]
        if num_tokens // self.block_size > start:
            tables = tuple([tables[slot] for tables in self.blocks])
            self._num_cached_blocks[slot] = self._cache(request, tables, start, num_tokens)

    def _cache(self, request: Request, tables: BlockTables, start: int, num_tokens: int) -> int:
        """Cache full, hashed blocks from index `start` on. Returns how many are cached now."""
        hashes = request.block_hashes
        end = min(num_tokens // self.block_size, len(hashes))
        if end <= start:
            return start
        if self._events is not None:
            self._log_stored(self._events, request, tables[0], start, end)
        if self._is_simple:
            self.pool.cache(tables[0][start:end], hashes[start:end])
        else:
            for group, table in enumerate(tables):
                self._cache_group(group, table, start, end, hashes, num_tokens)
        return end

    def _cache_group(
        self,
        group: int,
        table: list[int],
        start: int,
        end: int,
        hashes: list[bytes],
        num_tokens: int,
    ) -> None:
        kind = self.groups[group].kind
        if kind is AttentionKind.CROSS:
            return
        if kind is AttentionKind.STATE_SPACE:
            # The block holds the state that its digest stands for only while its last token is the last one computed.
            block = table[end - 1]
            if num_tokens == end * self.block_size and block != NULL_BLOCK:
                self._new_states.append((block, group_key(hashes[end - 1], group)))
            return
        blocks, keys = table[start:end], group_keys(hashes[start:end], group)
        if NULL_BLOCK in blocks:
            held = [(block, key) for block, key in zip(blocks, keys, strict=True) if block]
            blocks, keys = [block for block, _ in held], [key for _, key in held]
        self.pool.cache(blocks, keys)

    def _cache_states(self) -> None:
        """Make the states findable that the steps sent so far leave behind.

        Unlike keys, a state is there for others only when the step that computes it has ended.
        """
        for block, key in self._new_states:
            self.pool.cache([block], [key])
        self._new_states.clear()

    def free(self, request: Request, num_tokens: int, *, is_preempted: bool = False) -> None:
        """Release the blocks of a request, the first `num_tokens` tokens of it staying findable.

        Blocks filled with output are hashed only here, where the request stops writing to them.
        """
        slot = request.slot
        if self._caches(request) and num_tokens // self.block_size > self._num_cached_blocks[slot]:
            num_output = max(0, num_tokens - request.num_prompt_tokens)
            output = self._slots.output_token_ids(slot)[:num_output]
            request.hash_output_blocks(output, self.block_size, self._hash_blocks)
            self.cache_blocks(request, num_tokens)
        self._capacity[slot] = 0
        if self._new_states:
            self._cache_states()
        if is_preempted and self.host is not None:
            self._swap(slot)
        if self._is_simple:
            self.pool.release(self.blocks[0][slot])
            self.blocks[0][slot] = []
            return
        for tables in self.blocks:
            self.pool.release([block for block in tables[slot] if block != NULL_BLOCK])
            tables[slot] = []
        self._dropped = [place for place in self._dropped if place[1] != slot]

    def _swap(self, slot: int) -> None:
        """Decide what becomes of the blocks of a request that is being preempted.

        With `swap` they are copied to the host at once, with `auto` as they are evicted, with `recompute` never.
        """
        blocks = [block for tables in self.blocks for block in tables[slot] if block != NULL_BLOCK]
        if self._preemption_mode is PreemptionMode.RECOMPUTE:
            self._unwanted.update(
                block
                for block in blocks
                if self.pool.ref_counts[block] == 1 and self.pool.key_of(block) is not None
            )
        elif self._preemption_mode is PreemptionMode.SWAP and self.host is not None:
            for block in reversed(blocks):
                key = self.pool.key_of(block)
                if key is not None:
                    self.host.store(key, block)

    def _keep_evicted(self, key: bytes, block: int) -> None:
        if block in self._unwanted:
            self._unwanted.remove(block)
        elif self.host is not None:
            self.host.store(key, block)

    def distrust(self, request: Request, num_valid_blocks: int = 0) -> None:
        """Let nobody find the blocks of a running request but the first valid ones."""
        self._cache_states()
        digests = request.block_hashes[num_valid_blocks : self._num_cached_blocks[request.slot]]
        for group in range(len(self.groups)):
            keys = group_keys(digests, group)
            self.pool.uncache(keys)
            if self.host is not None:
                self.host.forget(keys)
        request.has_untrusted_blocks = True

    def reserve(self, request: Request, blocks: list[int]) -> None:
        """Hold allocated blocks for a request without a slot."""
        self.reserved[request.transfer_id] = blocks

    def keep(self, request: Request, num_blocks: int) -> None:
        """Go on holding the first blocks of a running request after it has left its slot."""
        blocks = self.blocks[0][request.slot][:num_blocks]
        self.pool.hold(blocks, 0)
        self.reserved[request.transfer_id] = blocks

    def trim_reserved(self, request: Request, num_tokens: int) -> None:
        """Release the reserved blocks but those of the first tokens, which become findable."""
        blocks = self.reserved[request.transfer_id]
        num_kept = -(-num_tokens // self.block_size)
        self.pool.release(blocks[num_kept:])
        if not num_kept:
            del self.reserved[request.transfer_id]
            return
        self.reserved[request.transfer_id] = blocks[:num_kept]
        if self._caches(request):
            self._cache(request, (blocks,), 0, num_tokens)

    def release_reserved(self, transfer_id: int) -> None:
        """Nobody needs these blocks any more."""
        self.pool.release(self.reserved.pop(transfer_id))

    def count_common_blocks(self, slots: SlotArray) -> int:
        """The first blocks that all of several slots share, where every block is kept."""
        ref_counts, num_slots = self.pool.ref_counts, len(slots)
        if num_slots < 2 or self._full_group is None:
            return 0
        tables = self.blocks[self._full_group]
        if ref_counts[tables[slots[0]][0]] < num_slots:
            return 0
        rows = [tables[slot] for slot in slots.tolist()]
        # Whatever the least and the greatest of the tables have in common, those between them have, too.
        ends = zip(min(rows), max(rows), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Does nothing and returns False while any block is held."""
        if not self.pool.reset():
            return False
        if self.host is not None:
            self.host.clear()
            self._unwanted.clear()
        return True

    def _log_stored(
        self, events: KVEventLog, request: Request, table: list[int], start: int, end: int
    ) -> None:
        """Log the runs of blocks that are about to become findable."""
        hashes, size = request.block_hashes, self.block_size
        output = (
            self._slots.output_token_ids(request.slot)
            if request.slot >= 0
            else int32_view(request.output_token_ids)
        )
        token_ids = np.concatenate((int32_view(request.prompt_token_ids), output))
        fresh = (
            index
            for index in range(start, end)
            if table[index] != NULL_BLOCK and not self.pool.is_cached(hashes[index])
        )
        for _, run in groupby(enumerate(fresh), lambda item: item[1] - item[0]):
            indices = [index for _, index in run]
            first, last = indices[0], indices[-1] + 1
            parent = hashes[first - 1] if first else None
            tokens = token_ids[first * size : last * size].tolist()
            events.stored(hashes[first:last], parent, tokens)

    def _caches(self, request: Request) -> bool:
        return (
            self.enable_prefix_caching
            and bool(request.root_hash)
            and not request.has_untrusted_blocks
        )
