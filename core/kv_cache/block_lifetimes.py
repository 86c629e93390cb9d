"""Measure how long a sample of cached blocks stays cached, stays idle, and waits for reuse, for the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SAMPLE_INTERVAL: Final = 64
"""One in this many newly cached blocks is sampled."""

MAX_SAMPLES: Final = 32
"""Maximum number of sampled blocks that are followed at a time, because each cache hit examines all of them."""


class BlockLifetimes:
    """Follows sampled blocks from caching to eviction. Times are in seconds, on the scheduler's clock `now`."""

    def __init__(self, ref_counts: Sequence[int]) -> None:
        self.now = 0.0
        self.has_updates = False
        self._ref_counts = ref_counts
        self.num_until_sample = SAMPLE_INTERVAL
        """Number of blocks to be cached before the next one is sampled."""
        self._cached_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._held: set[int] = set()
        self._lifetimes: list[float] = []
        self._idle_times: list[float] = []
        self._reuse_gaps: list[float] = []

    def sample_cached(self, blocks: Sequence[int], hash_of: Sequence[bytes | None]) -> None:
        """Sample one of the blocks that were just cached, if one is due."""
        block = blocks[self.num_until_sample + len(blocks) - 1]
        self.num_until_sample = SAMPLE_INTERVAL - -self.num_until_sample % SAMPLE_INTERVAL
        if hash_of[block] is not None and len(self._cached_at) < MAX_SAMPLES:
            self._cached_at.setdefault(block, self.now)
            self._held.add(block)

    def record_held(self) -> None:
        """Record that some free cached blocks are in use again."""
        for block in [block for block in self._idle_since if self._ref_counts[block]]:
            self._reuse_gaps.append(self.now - self._idle_since.pop(block))
            self.has_updates = True
            self._held.add(block)

    def record_released(self, blocks: Sequence[int]) -> None:
        """Record that blocks lost a reference, some of them their last."""
        # Of many blocks, it is faster to examine the sampled ones.
        if len(blocks) < MAX_SAMPLES and self._held.isdisjoint(blocks):
            return
        for block in [block for block in self._held if not self._ref_counts[block]]:
            self._held.remove(block)
            self._idle_since[block] = self.now

    def record_evicted(self, blocks: Sequence[int]) -> None:
        """Record that free cached blocks were allocated for other content."""
        if self._idle_since.keys().isdisjoint(blocks):
            return
        self.has_updates = True
        for block in blocks:
            if block in self._idle_since:
                self._lifetimes.append(self.now - self._cached_at.pop(block))
                self._idle_times.append(self.now - self._idle_since.pop(block))

    def stop_following(self, block: int) -> None:
        """Stop following a block that is no longer cached for a reason other than eviction."""
        self._cached_at.pop(block, None)
        self._idle_since.pop(block, None)
        self._held.discard(block)

    def reset(self) -> None:
        """Stop following all blocks."""
        self._cached_at.clear()
        self._idle_since.clear()
        self._held.clear()

    def take_samples(self) -> tuple[list[float], list[float], list[float]]:
        """Return (lifetimes, idle times before eviction, reuse gaps) since the last call, in seconds."""
        self.has_updates = False
        taken = self._lifetimes, self._idle_times, self._reuse_gaps
        self._lifetimes, self._idle_times, self._reuse_gaps = [], [], []
        return taken
