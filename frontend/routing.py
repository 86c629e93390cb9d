"""Which replica a prompt goes to: one that has computed its beginning already, within the bounds of balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from ..protocol.arrays import uint64_view
from ..protocol.messages import ReplicaNews

HEADROOM: Final = 4
"""A replica may always have so many sequences more than the least loaded one, for the sake of a cached prefix."""


class CachedPrefixes:
    """The keys of the blocks that a core has, or will have when it has computed what it was sent."""

    def __init__(self) -> None:
        self._stored: set[int] = set()
        self._expected: Counter[int] = Counter()

    def take_in(self, news: ReplicaNews) -> None:
        if news.is_whole:
            self._stored.clear()
        self._stored.update(uint64_view(news.stored).tolist())
        self._stored.difference_update(uint64_view(news.removed).tolist())

    def forget(self) -> None:
        """The core is gone, and its cache. Its sequences are still expected: its successor gets them."""
        self._stored.clear()

    def expect(self, keys: Iterable[int]) -> None:
        """A sequence with these prompt blocks is with the core."""
        self._expected.update(keys)

    def expect_no_more(self, keys: Iterable[int]) -> None:
        expected = self._expected
        for key in keys:
            if expected[key] > 1:
                expected[key] -= 1
            else:
                del expected[key]

    def count(self, keys: Iterable[int]) -> int:
        """How many of a prompt's first blocks are there."""
        num_found = 0
        for key in keys:
            if key not in self._stored and key not in self._expected:
                break
            num_found += 1
        return num_found


def choose(
    loads: Sequence[int], num_cached: Sequence[int], num_blocks: int, home: int, max_num_seqs: int
) -> int:
    """Which replica gets a prompt of `num_blocks` full blocks, `num_cached` of which each has.

    One that has at least half of them, and the most, goes before one with fewer of the `loads`, which are counted in
    sequences. But it must be balanced: its load is at most twice the least, and no more than it runs at once, or at
    most `HEADROOM` above the least. What is equal goes to `home`, or the next after it: frontends that agree on a
    prompt's home send it the same way.
    """
    least = min(loads)
    bound = max(least + HEADROOM, min(2 * least, max_num_seqs - 1))
    count = len(loads)

    def preference(index: int) -> tuple[int, int, int, int]:
        found = num_cached[index]
        worth_a_wait = found if 2 * found >= num_blocks else 0
        return -worth_a_wait, loads[index], -found, (index - home) % count

    return min((index for index in range(count) if loads[index] <= bound), key=preference)
