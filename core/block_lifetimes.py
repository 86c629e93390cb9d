"""How long cached blocks stay, how long they idle and how soon they are used again, from a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SAMPLE_INTERVAL: Final = 64
"""One of so many newly cached blocks is followed."""

MAX_SAMPLES: Final = 32
"""Blocks followed at a time: so few that each hit may look at all of them."""


class BlockLifetimes:
    """Follows blocks from when they become findable until they are evicted. Times are in seconds of `now`."""

    def __init__(self, ref_counts: Sequence[int]) -> None:
        self.now = 0.0
        self.has_news = False
        self._ref_counts = ref_counts
        self.num_until_sample = SAMPLE_INTERVAL
        """Blocks to be cached until one of them is followed."""
        self._cached_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._held: set[int] = set()
        self._lifetimes: list[float] = []
        self._idle_times: list[float] = []
        self._reuse_gaps: list[float] = []

    def sample(self, blocks: Sequence[int], hash_of: Sequence[bytes | None]) -> None:
        """Held blocks became findable, those that have a hash; one of them is due to be followed."""
        block = blocks[self.num_until_sample + len(blocks) - 1]
        self.num_until_sample = SAMPLE_INTERVAL - -self.num_until_sample % SAMPLE_INTERVAL
        if hash_of[block] is not None and len(self._cached_at) < MAX_SAMPLES:
            self._cached_at.setdefault(block, self.now)
            self._held.add(block)

    def held(self) -> None:
        """Free blocks were found and are used again."""
        for block in [block for block in self._idle_since if self._ref_counts[block]]:
            self._reuse_gaps.append(self.now - self._idle_since.pop(block))
            self.has_news = True
            self._held.add(block)

    def released(self, blocks: Sequence[int]) -> None:
        """Blocks lost a reference, some cached ones of them their last."""
        if self._held.isdisjoint(blocks):
            return
        for block in blocks:
            if block in self._held and not self._ref_counts[block]:
                self._held.remove(block)
                self._idle_since[block] = self.now

    def evicted(self, blocks: Sequence[int]) -> None:
        """Free blocks were taken for other content."""
        if self._idle_since.keys().isdisjoint(blocks):
            return
        self.has_news = True
        for block in blocks:
            if block in self._idle_since:
                self._lifetimes.append(self.now - self._cached_at.pop(block))
                self._idle_times.append(self.now - self._idle_since.pop(block))

    def forgotten(self, block: int) -> None:
        """A block is no longer findable, although its memory was not needed."""
        self._cached_at.pop(block, None)
        self._idle_since.pop(block, None)
        self._held.discard(block)

    def reset(self) -> None:
        self._cached_at.clear()
        self._idle_since.clear()
        self._held.clear()

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """(lifetimes, idle times before eviction, reuse gaps) since the last call."""
        self.has_news = False
        taken = self._lifetimes, self._idle_times, self._reuse_gaps
        self._lifetimes, self._idle_times, self._reuse_gaps = [], [], []
        return taken
