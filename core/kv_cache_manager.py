"""Which blocks each running request holds, and which prefixes are found in the cache."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ..protocol.arrays import Int32Array, Int64Array
from .block_pool import BlockPool
from .request import Request
from .slots import SlotArray

FULL_ATTENTION_GROUP: Final = 0


class Growth(NamedTuple):
    """Blocks that some slots need in addition: `slots[i]` needs `counts[i]` > 0 of them."""

    slots: SlotArray
    counts: Int64Array
    total: int


class KVCacheManager:
    """Blocks by slot over one `BlockPool`. Allocation is all or nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """The blocks of each slot in the order of its tokens."""
        self._capacity: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_cached_blocks = [0] * max_num_seqs

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request holds every block."""
        return (self.pool.num_blocks - 1) * self.block_size

    def find_computed_blocks(self, request: Request) -> list[int]:
        """The cached blocks of the longest known prefix, which leaves at least one token to compute."""
        if not self.reads_cache_for(request):
            return []
        limit = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.block_hashes[:limit])

    def reads_cache_for(self, request: Request) -> bool:
        """Prompt log-probabilities need the whole prompt to be computed."""
        return self._caches(request) and request.params.prompt_logprobs is None

    def can_admit(self, computed_blocks: list[int], num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens fit, the found blocks being part of them."""
        num_new = -(-num_tokens // self.block_size) - len(computed_blocks)
        return num_new + self.pool.count_free(computed_blocks) <= self.pool.num_free

    def admit(self, slot: int, computed_blocks: list[int], num_tokens: int) -> list[int]:
        """Give an empty slot the found blocks and new ones for `num_tokens`. Returns all of them."""
        num_blocks = -(-num_tokens // self.block_size)
        self._num_cached_blocks[slot] = len(computed_blocks)
        self.pool.hold(computed_blocks)
        blocks = computed_blocks + self.pool.allocate(num_blocks - len(computed_blocks))
        self.blocks[slot] = blocks
        self._capacity[slot] = num_blocks * self.block_size
        return blocks

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
        hashes = request.block_hashes
        end = min(num_tokens // self.block_size, len(hashes))
        if end > start:
            self.pool.cache(self.blocks[slot][start:end], hashes[start:end])
            self._num_cached_blocks[slot] = end

    def free(self, request: Request, num_tokens: int, output_token_ids: Int32Array) -> None:
        """Release the blocks of a request, the first `num_tokens` tokens of it staying findable.

        Blocks filled with output are hashed only here, where the request stops writing to them.
        """
        slot = request.slot
        if self._caches(request) and num_tokens // self.block_size > self._num_cached_blocks[slot]:
            num_output = max(0, num_tokens - request.num_prompt_tokens)
            request.hash_output_blocks(output_token_ids[:num_output], self.block_size)
            self.cache_blocks(request, num_tokens)
        self.pool.release(self.blocks[slot])
        self.blocks[slot] = []
        self._capacity[slot] = 0

    def distrust(self, request: Request) -> None:
        """Let nobody find the blocks of a request whose computation failed."""
        self.pool.uncache(self.blocks[request.slot])
        request.root_hash = b""

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Does nothing and returns False while any block is held."""
        return self.pool.reset()

    def _caches(self, request: Request) -> bool:
        return self.enable_prefix_caching and bool(request.root_hash)
