"""Which blocks each running request holds, and which prefixes are found in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..protocol.arrays import Int32Array, Int64Array, int32_view
from ..protocol.block_hash import PlacedInput, hash_blocks
from .block_pool import BlockPool
from .kv_event_log import KVEventLog
from .request import Request
from .slots import SlotArray, Slots

FULL_ATTENTION_GROUP: Final = 0

HashBlocks: TypeAlias = Callable[[Int32Array, int, bytes, Sequence[PlacedInput]], bytes]
"""`block_hash.hash_blocks`, or what stands for it where there are no tokens."""


class Growth(NamedTuple):
    """Blocks that some slots need in addition: `slots[i]` needs `counts[i]` > 0 of them."""

    slots: SlotArray
    counts: Int64Array
    total: int


class Prefix(NamedTuple):
    """The computed tokens that a waiting request can begin with, and their blocks.

    `num_cached_blocks` of these are findable; a reserved prefix is held for the request already.
    """

    blocks: list[int]
    num_tokens: int
    num_cached_blocks: int
    is_reserved: bool = False


class KVCacheManager:
    """Blocks by slot over one `BlockPool`. Allocation is all or nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        slots: Slots,
        enable_prefix_caching: bool,
        events: KVEventLog | None = None,
        hash_blocks: HashBlocks = hash_blocks,
    ) -> None:
        self.pool = BlockPool(num_blocks, events)
        self._events = events
        self._hash_blocks = hash_blocks
        self._slots = slots
        max_num_seqs = len(slots.requests)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """The blocks of each slot in the order of its tokens."""
        self.reserved: dict[int, list[int]] = {}
        """Blocks that are held for a transfer instead of by a slot, by its id."""
        self._capacity: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_cached_blocks = [0] * max_num_seqs

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request holds every block."""
        return (self.pool.num_blocks - 1) * self.block_size

    def find_prefix(self, request: Request) -> Prefix:
        """The longest known prefix, findable or reserved."""
        found = self.find_computed_blocks(request)
        num_tokens = len(found) * self.block_size
        if request.num_reserved_tokens > num_tokens:
            # The last token is computed again for what comes after it.
            num_tokens = min(request.num_reserved_tokens, request.num_tokens - 1)
            return Prefix(self.reserved[request.transfer_id], num_tokens, 0, is_reserved=True)
        return Prefix(found, num_tokens, len(found))

    def find_computed_blocks(self, request: Request) -> list[int]:
        """The cached blocks of the longest known prefix, which leaves at least one token to compute."""
        limit = (request.num_tokens - 1) // self.block_size
        if not limit or not self.reads_cache_for(request):
            return []
        return self.pool.find(request.block_hashes[:limit])

    def reads_cache_for(self, request: Request) -> bool:
        """Prompt log-probabilities need the whole prompt to be computed."""
        return (
            self.enable_prefix_caching
            and bool(request.root_hash)
            and request.params.prompt_logprobs is None
        )

    def allocate(self, computed_blocks: list[int], num_tokens: int) -> list[int] | None:
        """Hold blocks for `num_tokens` tokens, beginning with the found ones; None if they do not fit."""
        num_new = -(-num_tokens // self.block_size) - len(computed_blocks)
        num_revived = self.pool.count_free(computed_blocks) if computed_blocks else 0
        if num_new + num_revived > self.pool.num_free:
            return None
        if computed_blocks:
            self.pool.hold(computed_blocks, num_revived)
        return computed_blocks + self.pool.allocate(num_new)

    def count_needed(
        self, computed_blocks: list[int], num_tokens: int, without: Sequence[int] = ()
    ) -> int:
        """How many free blocks `allocate` would take, less those that vacating some slots would free."""
        num_new = -(-num_tokens // self.block_size) - len(computed_blocks)
        needed = num_new + self.pool.count_free(computed_blocks)
        if without:
            held = Counter(chain.from_iterable(self.blocks[slot] for slot in without))
            kept = set(computed_blocks)
            needed -= sum(
                count == self.pool.ref_counts[block] and block not in kept
                for block, count in held.items()
            )
        return needed

    def assign(self, request: Request, blocks: list[int], num_cached: int, num_tokens: int) -> None:
        """Give a request its blocks: `num_cached` found ones, and those that `num_tokens` tokens will fill."""
        slot = request.slot
        self.blocks[slot] = blocks
        self._capacity[slot] = len(blocks) * self.block_size
        self._num_cached_blocks[slot] = num_cached
        self.cache_blocks(request, num_tokens)

    def plan_growth(self, slots: SlotArray, num_tokens: Int64Array) -> Growth:
        """What `slots` lack to hold `num_tokens` tokens each."""
        missing = num_tokens - self._capacity[slots]
        rows = (missing > 0).nonzero()[0]
        counts = -(-missing[rows] // self.block_size)
        return Growth(slots[rows], counts, int(counts.sum()) if len(rows) else 0)

    def grow(self, growth: Growth) -> Int32Array:
        """Carry out a planned growth that fits. Returns rows (group, slot, index, block)."""
        slots, counts, total = growth
        blocks = self.pool.allocate(total)
        updates = np.empty((total, 4), np.int32)
        updates[:, 0] = FULL_ATTENTION_GROUP
        updates[:, 3] = blocks
        num_held = self._capacity[slots] // self.block_size
        self._capacity[slots] = (num_held + counts) * self.block_size
        if total > len(slots):
            first = np.cumsum(counts) - counts
            num_held = np.repeat(num_held - first, counts) + np.arange(total)
            slots = np.repeat(slots, counts)
        updates[:, 1] = slots
        updates[:, 2] = num_held
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self.blocks[slot].append(block)
        return updates

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full, hashed blocks among the request's first `num_tokens` tokens findable."""
        if not self._caches(request):
            return
        slot = request.slot
        start = self._num_cached_blocks[slot]
        self._num_cached_blocks[slot] = self._cache(request, self.blocks[slot], start, num_tokens)

    def _cache(self, request: Request, blocks: list[int], start: int, num_tokens: int) -> int:
        """Cache full, hashed blocks from index `start` on. Returns how many are cached now."""
        hashes = request.block_hashes
        end = min(num_tokens // self.block_size, len(hashes))
        if end <= start:
            return start
        if self._events is not None:
            self._log_stored(self._events, request, start, end)
        self.pool.cache(blocks[start:end], hashes[start:end])
        return end

    def free(self, request: Request, num_tokens: int) -> None:
        """Release the blocks of a request, the first `num_tokens` tokens of it staying findable.

        Blocks filled with output are hashed only here, where the request stops writing to them.
        """
        slot = request.slot
        if self._caches(request) and num_tokens // self.block_size > self._num_cached_blocks[slot]:
            num_output = max(0, num_tokens - request.num_prompt_tokens)
            output = self._slots.output_token_ids(slot)[:num_output]
            request.hash_output_blocks(output, self.block_size, self._hash_blocks)
            self.cache_blocks(request, num_tokens)
        self.pool.release(self.blocks[slot])
        self.blocks[slot] = []
        self._capacity[slot] = 0

    def distrust(self, request: Request, num_valid_blocks: int = 0) -> None:
        """Let nobody find the blocks of a running request but the first valid ones."""
        self.pool.uncache(self.blocks[request.slot][num_valid_blocks:])
        request.has_untrusted_blocks = True

    def reserve(self, request: Request, blocks: list[int]) -> None:
        """Hold allocated blocks for a request without a slot."""
        self.reserved[request.transfer_id] = blocks

    def keep(self, request: Request, num_blocks: int) -> None:
        """Go on holding the first blocks of a running request after it has left its slot."""
        blocks = self.blocks[request.slot][:num_blocks]
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
            self._cache(request, blocks, 0, num_tokens)

    def release_reserved(self, transfer_id: int) -> None:
        """Nobody needs these blocks any more."""
        self.pool.release(self.reserved.pop(transfer_id))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Does nothing and returns False while any block is held."""
        return self.pool.reset()

    def _log_stored(self, events: KVEventLog, request: Request, start: int, end: int) -> None:
        """Log the runs of blocks that are about to become findable."""
        hashes, size = request.block_hashes, self.block_size
        output = (
            self._slots.output_token_ids(request.slot)
            if request.slot >= 0
            else int32_view(request.output_token_ids)
        )
        token_ids = np.concatenate((int32_view(request.prompt_token_ids), output))
        fresh = (index for index in range(start, end) if not self.pool.is_cached(hashes[index]))
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
