"""Manage the KV cache of one replica: allocate blocks to requests, share cached ones, and free them.

`claim_blocks` and `allocate_claimed` allocate blocks, `free_requests` frees them, and `block_pool.py` evicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from ...protocol.arrays import float32_bytes
from ...protocol.block_hash import HashBlocks
from ...protocol.config import PreemptionMode
from ...protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from ...protocol.messages import SchedulerStats
from ..state.request import Request
from ..state.slots import SlotArray, Slots
from .block_pool import NULL_BLOCK, BlockPool
from .block_tables import BlockTables, RequestBlocks
from .cached_prefix import CachedPrefix, Deferred, FindExternal
from .cpu_offload import CPUOffload
from .event_log import KVEventLog
from .prefix_cache import PrefixCache


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The computed tokens from which a waiting request can start.

    Other requests can find the first `num_cached_blocks` of these blocks as well. The blocks of a reserved prefix are
    already held for the request.
    """

    blocks: CachedPrefix
    num_tokens: int
    num_cached_blocks: int
    is_reserved: bool = False


class Claim(msgspec.Struct, gc=False):
    """A claim on `num_new` free blocks, in addition to the cached blocks of `prefix`.

    The request then has `num_blocks` blocks in each group that grows with its tokens. After the cached prefix, a KV
    connector loads `num_external` tokens within the step, and then `num_granted` tokens are computed.
    """

    request: Request
    prefix: Prefix
    num_blocks: int
    num_new: int
    num_external: int = 0
    num_granted: int = 0
    tables: RequestBlocks = ()
    """The blocks of the request in each group; empty until `allocate_claimed`."""


class KVCacheManager:
    """The block tables and the prefix cache over one `BlockPool`.

    A request gets all the blocks that it needs, or none.
    """

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
        hash_blocks: HashBlocks,
        token_unit: int = 1,
    ) -> None:
        self.token_unit = token_unit
        """The number of a request's tokens that are always computed together."""
        self.cpu_offload = CPUOffload(num_host_blocks) if num_host_blocks else None
        self._preemption_mode = preemption_mode
        self._not_offloaded: set[int] = set()
        self.pool = BlockPool(num_blocks, events, self._keep_evicted if self.cpu_offload else None)
        self._slots = slots
        self.block_size = block_size
        self.groups = groups
        self.tables = BlockTables(self.pool, groups, block_size, len(slots.requests))
        self.prefix_cache = PrefixCache(
            self.pool,
            self.cpu_offload,
            slots,
            groups,
            block_size,
            enabled=enable_prefix_caching,
            events=events,
            hash_blocks=hash_blocks,
        )
        self.reserved: dict[int, RequestBlocks] = {}
        """Blocks that are held without a slot, for a transfer or a waiting request, by transfer id."""
        self._num_claimed = 0
        self._no_prefix = Prefix(self.prefix_cache.no_prefix, 0, 0)

    # Before a request gets a slot

    @property
    def blocks(self) -> list[list[list[int]]]:
        """The blocks of each group and slot."""
        return self.tables.blocks

    def find_prefix(self, request: Request) -> Prefix:
        """Return the longest computed prefix of a request, cached or reserved."""
        found = self.prefix_cache.find_prefix(request)
        if not (found.num_blocks or request.num_reserved_tokens):
            return self._no_prefix
        num_tokens = found.num_blocks * self.block_size
        if request.num_reserved_tokens > num_tokens:
            tables = self.reserved[request.transfer_id]
            blocks = tables if self.tables.is_simple else tuple(map(_held_tail, tables))
            # Compute the last token in any case, because its output is needed.
            num_tokens = min(request.num_reserved_tokens, request.num_tokens - 1)
            num_tokens -= num_tokens % self.token_unit
            num_blocks = max(map(len, tables))
            return Prefix(CachedPrefix(num_blocks, blocks), num_tokens, 0, is_reserved=True)
        return Prefix(found, num_tokens, found.num_present)

    def count_shared_tokens(self, request: Request) -> int:
        """Return the number of tokens at the beginning of a request that have cached keys and values.

        A recurrent state after them is not needed.
        """
        return self.prefix_cache.count_shared_blocks(request) * self.block_size

    def find_longer_prefix(
        self, request: Request, prefix: Prefix, find_external: FindExternal, last_key: bytes = b""
    ) -> Prefix | Deferred | None:
        """Return a longer prefix than `prefix` if a KV connector can load its missing blocks, else None.

        It ends before the last token, which is computed. `last_key` names the block with the tokens before that one.
        """
        num_blocks = prefix.blocks.num_blocks
        found = self.prefix_cache.find_longer_prefix(request, num_blocks, find_external, last_key)
        if found is None or found is Deferred.DEFERRED:
            return found
        num_tokens = min(found.num_blocks * self.block_size, request.num_tokens - 1)
        return Prefix(found, num_tokens, found.num_present)

    def claim_blocks(
        self, request: Request, prefix: Prefix, num_tokens: int, num_left: int = 0
    ) -> Claim | None:
        """Hold the cached blocks of `prefix`, and claim free blocks so that the request can hold `num_tokens` tokens.

        Return None, and hold nothing, if fewer than `num_left` blocks would be left free.
        """
        pool, found = self.pool, prefix.blocks
        num_free = pool.num_free - self._num_claimed - num_left
        num_blocks = num_new = -(-num_tokens // self.block_size)
        if found.num_blocks or not self.tables.is_simple:
            num_new = self.tables.count_new(request, found, num_blocks)
            present = _present_blocks(found)
            if num_new > num_free or not pool.hold_blocks(present, num_free - num_new):
                return None
            if self.cpu_offload is not None:
                self._not_offloaded.difference_update(present)
                self.cpu_offload.reserve_blocks(
                    load.key for load in found.loads if not load.is_external
                )
        elif num_new > num_free:
            return None
        self._num_claimed += num_new
        return Claim(request, prefix, num_blocks, num_new)

    def allocate_claimed(self, claims: Sequence[Claim]) -> None:
        """Allocate the blocks of all claims."""
        new = self.pool.allocate_blocks(self._num_claimed)
        self._num_claimed = 0
        start = 0
        for claim in claims:
            if claim.tables:
                continue
            prefix = claim.prefix.blocks
            blocks = new[start : start + claim.num_new]
            start += claim.num_new
            for load in prefix.loads:
                block = prefix.blocks[load.group][load.position] = blocks.pop()
                if self.cpu_offload is not None and not load.is_external:
                    self.cpu_offload.load_block(load.key, block)
            if prefix.num_blocks or not self.tables.is_simple:
                claim.tables = self.tables.build_tables(
                    claim.request, prefix, claim.num_blocks, blocks
                )
            else:
                claim.tables = (blocks,)

    def count_needed(
        self,
        request: Request,
        prefix: CachedPrefix,
        num_tokens: int,
        without: Sequence[int] = (),
    ) -> int:
        """Return how many free blocks `claim_blocks` would take.

        The blocks that freeing the slots `without` would return to the pool are subtracted.
        """
        num_blocks = -(-num_tokens // self.block_size)
        needed = self.tables.count_new(request, prefix, num_blocks)
        found = _present_blocks(prefix)
        needed += self.pool.count_free(found)
        return needed - self.tables.count_freed(without, set(found)) if without else needed

    # While a request has a slot

    def assign_slots(self, claims: Sequence[Claim], num_tokens: Sequence[int]) -> None:
        """Assign the claimed blocks to the slots of their requests.

        `num_tokens[i]` is the number of tokens of request i that will be computed after the step.
        """
        num_cached_blocks, tables = self.prefix_cache.num_cached_blocks, self.tables
        num_cached = self.prefix_cache.cache_new_requests(
            [claim.request for claim in claims],
            [claim.tables for claim in claims],
            [claim.prefix.num_cached_blocks for claim in claims],
            num_tokens,
        )
        for claim, count in zip(claims, num_cached, strict=True):
            num_cached_blocks[claim.request.slot] = count
        if tables.is_simple:
            tables.assign_simple_tables(
                [claim.request.slot for claim in claims], [claim.tables[0] for claim in claims]
            )
            return
        for claim in claims:
            tables.assign_tables(claim.request.slot, claim.tables, claim.prefix.blocks)
            self.prefix_cache.start_output(claim.request)

    def free_unseen_blocks(self, slots: SlotArray, *, may_be_rejected: bool) -> None:
        """Free the blocks of windowed groups that no future token of `slots` attends to.

        Tokens of steps in flight count as computed, except drafts, which may be rejected.
        """
        self.prefix_cache.cache_states()
        num_computed = self._slots.num_computed_tokens[slots]
        if may_be_rejected:
            num_computed = np.minimum(num_computed, self._slots.num_known_tokens(slots) - 1)
        self.tables.advance_windows(slots, num_computed, self.prefix_cache.cache_output_state)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full, hashed blocks among the first `num_tokens` tokens of a running request findable."""
        cache, slot = self.prefix_cache, request.slot
        start = cache.num_cached_blocks[slot]
        if num_tokens // self.block_size > start and cache.may_write(request):
            tables = self.tables.get_tables(slot)
            cache.num_cached_blocks[slot] = cache.cache_blocks(request, tables, start, num_tokens)

    def invalidate_blocks(self, request: Request, num_valid_blocks: int) -> None:
        """Make all blocks of a running request unfindable, except the first `num_valid_blocks`."""
        self.prefix_cache.invalidate_blocks(request, num_valid_blocks)

    # When a request leaves its slot

    def free_requests(
        self, requests: list[Request], num_tokens: list[int], *, is_preempted: bool = False
    ) -> None:
        """Free the blocks of running requests. The first `num_tokens[i]` tokens of request i stay findable.

        Blocks filled with output are hashed only now, when the request no longer writes to them.
        """
        cache = self.prefix_cache
        slots = [request.slot for request in requests]
        for index, slot in enumerate(slots):
            num_cached = cache.num_cached_blocks[slot]
            if num_tokens[index] // self.block_size > num_cached:
                request = requests[index]
                if cache.may_write(request):
                    cache.hash_output(request, num_tokens[index])
                    cache.cache_blocks(
                        request, self.tables.get_tables(slot), num_cached, num_tokens[index]
                    )
        cache.cache_states()
        if is_preempted and self.cpu_offload is not None:
            for slot in slots:
                self._offload_preempted(slot)
        self.tables.free_slots(slots)

    def _offload_preempted(self, slot: int) -> None:
        """Apply the preemption mode to the blocks of a request that is being preempted.

        `swap` copies them to CPU memory now, `auto` when they are evicted, `recompute` never.
        """
        blocks = [
            block
            for table in self.tables.get_tables(slot)
            for block in table
            if block != NULL_BLOCK
        ]
        if self._preemption_mode is PreemptionMode.RECOMPUTE:
            self._not_offloaded.update(
                block
                for block in blocks
                if self.pool.ref_counts[block] == 1 and self.pool.get_key(block) is not None
            )
        elif self._preemption_mode is PreemptionMode.SWAP and self.cpu_offload is not None:
            for block in reversed(blocks):
                key = self.pool.get_key(block)
                if key is not None:
                    self.cpu_offload.store_block(key, block)

    def _keep_evicted(self, key: bytes, block: int) -> None:
        if block in self._not_offloaded:
            self._not_offloaded.remove(block)
        elif self.cpu_offload is not None:
            self.cpu_offload.store_block(key, block)

    def write_stats(self, stats: SchedulerStats) -> None:
        """Write the usage of blocks, and the counts and times since the last call, to `stats`."""
        pool, host = self.pool, self.cpu_offload
        stats.kv_cache_usage = pool.usage
        if pool.lifetimes.has_updates:
            lifetimes, idle_times, reuse_gaps = pool.lifetimes.take_samples()
            stats.block_lifetimes = float32_bytes(lifetimes)
            stats.block_idle_times = float32_bytes(idle_times)
            stats.block_reuse_gaps = float32_bytes(reuse_gaps)
        if host is not None:
            stats.cpu_offload_usage = host.usage
            stats.num_blocks_copied_out, stats.num_blocks_copied_in = host.take_counts()

    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes. Return False, and change nothing, while any block is held."""
        if not self.pool.reset_cache():
            return False
        if self.cpu_offload is not None:
            self.cpu_offload.clear()
            self._not_offloaded.clear()
        return True

    # Blocks without a slot

    def reserve_blocks(self, request: Request, tables: RequestBlocks) -> None:
        """Hold allocated blocks for a request without a slot.

        Blocks for cross attention are freed, because they are filled again when the request gets its slot.
        """
        kept = list(tables)
        for number, group in enumerate(self.groups):
            if group.kind is AttentionKind.CROSS:
                self.pool.release_blocks(kept[number])
                kept[number] = []
        self.reserved[request.transfer_id] = tuple(kept)

    def keep_blocks(self, request: Request, num_blocks: int) -> None:
        """Keep the first blocks of a running request after it loses its slot, except those for cross attention."""
        kept = []
        for group, table in zip(self.groups, self.tables.get_tables(request.slot), strict=True):
            blocks = [] if group.kind is AttentionKind.CROSS else list(table[:num_blocks])
            self.pool.hold_blocks(_held_tail(blocks), 0)
            kept.append(blocks)
        self.reserved[request.transfer_id] = tuple(kept)

    def trim_reserved(self, request: Request, num_tokens: int) -> None:
        """Release all reserved blocks beyond the first `num_tokens` tokens, and make the remaining ones findable."""
        tables = self.reserved[request.transfer_id]
        num_kept = -(-num_tokens // self.block_size)
        if not num_kept:
            self.release_reserved(request.transfer_id)
            return
        for table in tables:
            self.pool.release_blocks(table[num_kept:])
        self.reserved[request.transfer_id] = tuple(table[:num_kept] for table in tables)
        if self.prefix_cache.may_write(request):
            self.prefix_cache.cache_blocks(request, tables, 0, num_tokens)
            # No step in flight still computes the state, and the block may be released before the next step.
            self.prefix_cache.cache_states()

    def release_reserved(self, transfer_id: int) -> None:
        """Release the blocks that are reserved under this id."""
        for table in self.reserved.pop(transfer_id):
            self.pool.release_blocks(_held_tail(table))


def _held_tail(table: list[int]) -> list[int]:
    """Return the blocks of a table that are still held. A sliding window may have freed the first ones."""
    return table[table.count(NULL_BLOCK) :] if NULL_BLOCK in table else table


def _present_blocks(prefix: CachedPrefix) -> list[int]:
    """Return the blocks of a prefix that are in the workers' KV cache already, that is, need no load."""
    if not prefix.loads and len(prefix.blocks) == 1:
        return prefix.blocks[0]
    return [block for block in chain.from_iterable(prefix.blocks) if block >= 0]
