"""The KV cache of one replica: which blocks a request is given, and what becomes of them after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from ..protocol.block_hash import HashBlocks
from ..protocol.config import PreemptionMode
from ..protocol.kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from .block_pool import NULL_BLOCK, BlockPool
from .block_tables import BlockTables, RequestBlocks
from .cached_prefix import ON_HOST, CachedPrefix
from .host_tier import HostTier
from .kv_event_log import KVEventLog
from .prefix_cache import PrefixCache
from .request import Request
from .slots import SlotArray, Slots


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The computed tokens that a waiting request can begin with.

    Others can find the first `num_cached_blocks` of its blocks, too. A reserved prefix is held for the request already.
    """

    blocks: CachedPrefix
    num_tokens: int
    num_cached_blocks: int
    is_reserved: bool = False


class Claim(msgspec.Struct, gc=False):
    """A waiting request's right to `num_new` blocks beside the cached ones, `num_blocks` in each growing group."""

    request: Request
    prefix: Prefix
    num_blocks: int
    num_new: int
    tables: RequestBlocks = ()
    """What it has got, once it is fulfilled."""


class KVCacheManager:
    """Block tables and a prefix cache over one `BlockPool`. Allocation is all or nothing."""

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
    ) -> None:
        self.host = HostTier(num_host_blocks) if num_host_blocks else None
        self._preemption_mode = preemption_mode
        self._unwanted: set[int] = set()
        self.pool = BlockPool(num_blocks, events, self._keep_evicted if self.host else None)
        self._slots = slots
        self.block_size = block_size
        self.groups = groups
        self.tables = BlockTables(self.pool, groups, block_size, len(slots.requests))
        self.prefix_cache = PrefixCache(
            self.pool,
            self.host,
            slots,
            groups,
            block_size,
            enabled=enable_prefix_caching,
            events=events,
            hash_blocks=hash_blocks,
        )
        self.reserved: dict[int, RequestBlocks] = {}
        """Blocks that are held for a transfer or a waiting request instead of by a slot, by its transfer id."""
        self._num_claimed = 0
        self._no_prefix = Prefix(self.prefix_cache.no_prefix, 0, 0)

    # before a request gets a slot

    @property
    def blocks(self) -> list[list[list[int]]]:
        """The blocks of each group and slot."""
        return self.tables.blocks

    def find_prefix(self, request: Request) -> Prefix:
        """The longest known prefix, findable or reserved."""
        found = self.prefix_cache.find(request)
        if not (found.num_blocks or request.num_reserved_tokens):
            return self._no_prefix
        num_tokens = found.num_blocks * self.block_size
        if request.num_reserved_tokens > num_tokens:
            tables = self.reserved[request.transfer_id]
            blocks = tables if self.tables.is_simple else tuple(map(_held_tail, tables))
            # The last token is computed again, because its output is needed.
            num_tokens = min(request.num_reserved_tokens, request.num_tokens - 1)
            return Prefix(CachedPrefix(len(tables[0]), blocks), num_tokens, 0, is_reserved=True)
        return Prefix(found, num_tokens, found.num_present)

    def claim(self, request: Request, prefix: Prefix, num_tokens: int) -> Claim | None:
        """Hold the cached blocks, and set free ones aside for `num_tokens` tokens in all; None if they do not fit."""
        pool, found = self.pool, prefix.blocks
        num_free = pool.num_free - self._num_claimed
        num_blocks = num_new = -(-num_tokens // self.block_size)
        if found.num_blocks or not self.tables.is_simple:
            num_new = self.tables.count_new(found, num_blocks)
            present = _present_blocks(found)
            num_revived = pool.count_free(present)
            if num_new + num_revived > num_free:
                return None
            pool.hold(present, num_revived)
            if self.host is not None:
                self._unwanted.difference_update(present)
                self.host.reserve(load.key for load in found.loads)
        elif num_new > num_free:
            return None
        self._num_claimed += num_new
        return Claim(request, prefix, num_blocks, num_new)

    def fulfil(self, claims: Sequence[Claim]) -> None:
        """Allocate all that is claimed."""
        new = self.pool.allocate(self._num_claimed)
        self._num_claimed = 0
        start = 0
        for claim in claims:
            if claim.tables:
                continue
            prefix = claim.prefix.blocks
            blocks = new[start : start + claim.num_new]
            start += claim.num_new
            if self.host is not None:
                for load in prefix.loads:
                    block = prefix.blocks[load.group][load.position] = blocks.pop()
                    self.host.load(load.key, block)
            if prefix.num_blocks or not self.tables.is_simple:
                claim.tables = self.tables.lay_out(prefix, claim.num_blocks, blocks)
            else:
                claim.tables = (blocks,)

    def count_needed(
        self, prefix: CachedPrefix, num_tokens: int, without: Sequence[int] = ()
    ) -> int:
        """How many free blocks `claim` would take, less those that vacating some slots would free."""
        needed = self.tables.count_new(prefix, -(-num_tokens // self.block_size))
        found = _present_blocks(prefix)
        needed += self.pool.count_free(found)
        return needed - self.tables.count_freed(without, set(found)) if without else needed

    # while it has a slot

    def assign(self, claims: Sequence[Claim], num_tokens: Sequence[int]) -> None:
        """Put the blocks of claims into the slots of their requests, of which so many tokens will be computed."""
        num_cached_blocks = self.prefix_cache.num_cached_blocks
        num_cached = self.prefix_cache.fill(
            [claim.request for claim in claims],
            [claim.tables for claim in claims],
            [claim.prefix.num_cached_blocks for claim in claims],
            num_tokens,
        )
        for claim, count in zip(claims, num_cached, strict=True):
            slot = claim.request.slot
            self.tables.fill(slot, claim.tables, claim.prefix.blocks)
            num_cached_blocks[slot] = count

    def begin_step(self, slots: SlotArray, *, may_be_rejected: bool) -> None:
        """Free the blocks of windowed groups that no token still to be computed in `slots` will see.

        Tokens that steps in flight compute count as computed, unless they may be rejected.
        """
        self.prefix_cache.add_states()
        num_computed = self._slots.num_computed_tokens[slots]
        if may_be_rejected:
            num_computed = np.minimum(num_computed, self._slots.num_known_tokens(slots) - 1)
        self.tables.advance_windows(slots, num_computed)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full, hashed blocks among the request's first `num_tokens` tokens findable."""
        cache, slot = self.prefix_cache, request.slot
        start = cache.num_cached_blocks[slot]
        if num_tokens // self.block_size > start and cache.is_filled_by(request):
            tables = self.tables.of(slot)
            cache.num_cached_blocks[slot] = cache.add(request, tables, start, num_tokens)

    def distrust(self, request: Request, num_valid_blocks: int) -> None:
        """Make all blocks of a running request unfindable except for the first valid ones."""
        self.prefix_cache.distrust(request, num_valid_blocks)

    # when it leaves its slot

    def free(
        self, requests: list[Request], num_tokens: list[int], *, is_preempted: bool = False
    ) -> None:
        """Release the blocks of requests, the first `num_tokens[i]` tokens of each staying findable.

        Blocks filled with output are hashed only here, where the request stops writing to them.
        """
        cache = self.prefix_cache
        slots = [request.slot for request in requests]
        for index, slot in enumerate(slots):
            num_cached = cache.num_cached_blocks[slot]
            if num_tokens[index] // self.block_size > num_cached:
                request = requests[index]
                if cache.is_filled_by(request):
                    cache.hash_output(request, num_tokens[index])
                    cache.add(request, self.tables.of(slot), num_cached, num_tokens[index])
        cache.add_states()
        if is_preempted and self.host is not None:
            for slot in slots:
                self._swap(slot)
        self.tables.clear(slots)

    def _swap(self, slot: int) -> None:
        """Decide what becomes of the blocks of a request that is being preempted.

        With `swap` they are copied to the host at once, with `auto` as they are evicted, with `recompute` never.
        """
        blocks = [block for table in self.tables.of(slot) for block in table if block != NULL_BLOCK]
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

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Does nothing and returns False while any block is held."""
        if not self.pool.reset():
            return False
        if self.host is not None:
            self.host.clear()
            self._unwanted.clear()
        return True

    # blocks without a slot

    def reserve(self, request: Request, blocks: list[int]) -> None:
        """Hold allocated blocks for a request without a slot. There is one group."""
        self.reserved[request.transfer_id] = (blocks,)

    def keep(self, request: Request, num_blocks: int) -> None:
        """Go on holding the first blocks of a running request after it has left its slot. There is one group."""
        blocks = self.blocks[0][request.slot][:num_blocks]
        self.pool.hold(blocks, 0)
        self.reserved[request.transfer_id] = (blocks,)

    def trim_reserved(self, request: Request, num_tokens: int) -> None:
        """Release the reserved blocks but those of the first tokens, which become findable."""
        tables = self.reserved[request.transfer_id]
        num_kept = -(-num_tokens // self.block_size)
        if not num_kept:
            self.release_reserved(request.transfer_id)
            return
        for table in tables:
            self.pool.release(table[num_kept:])
        self.reserved[request.transfer_id] = tuple(table[:num_kept] for table in tables)
        if self.prefix_cache.is_filled_by(request):
            self.prefix_cache.add(request, tables, 0, num_tokens)

    def release_reserved(self, transfer_id: int) -> None:
        """Release blocks that were reserved under this id."""
        for table in self.reserved.pop(transfer_id):
            self.pool.release(_held_tail(table))


def _held_tail(table: list[int]) -> list[int]:
    """What is left of a table after its first blocks were given up."""
    return table[table.count(NULL_BLOCK) :] if NULL_BLOCK in table else table


def _present_blocks(prefix: CachedPrefix) -> list[int]:
    """The found blocks that are in the workers' cache."""
    if not prefix.loads and len(prefix.blocks) == 1:
        return prefix.blocks[0]
    return [block for block in chain.from_iterable(prefix.blocks) if block != ON_HOST]
