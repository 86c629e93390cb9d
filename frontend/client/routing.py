"""Prefix routing: choose a replica that has cached the beginning of a prompt, unless its load is too high."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from ...protocol.arrays import uint64_view
from ...protocol.messages import ReplicaLoadUpdate

HEADROOM: Final = 4
"""Extra sequences that a replica may have above the least loaded one for the sake of a cached prefix."""


class CachedPrefixes:
    """The keys of the blocks that a core has cached, or will have after computing its current sequences."""

    def __init__(self) -> None:
        self._stored: set[int] = set()
        self._expected: Counter[int] = Counter()

    def apply(self, update: ReplicaLoadUpdate) -> None:
        if update.is_whole:
            self._stored.clear()
        self._stored.update(uint64_view(update.stored).tolist())
        self._stored.difference_update(uint64_view(update.removed).tolist())

    def clear(self) -> None:
        """Clear the cache of a restarted core. Its sequences stay expected, because they are resubmitted to it."""
        self._stored.clear()

    def add_expected(self, keys: Iterable[int]) -> None:
        """Add the prompt blocks of a sequence that was sent to the core."""
        self._expected.update(keys)

    def remove_expected(self, keys: Iterable[int]) -> None:
        expected = self._expected
        for key in keys:
            if expected[key] > 1:
                expected[key] -= 1
            else:
                del expected[key]

    def count(self, keys: Iterable[int]) -> int:
        """Return how many of a prompt's first blocks are cached or expected."""
        num_found = 0
        for key in keys:
            if key not in self._stored and key not in self._expected:
                break
            num_found += 1
        return num_found


def choose(
    loads: Sequence[int], num_cached: Sequence[int], num_blocks: int, home: int, max_num_seqs: int
) -> int:
    """Choose a replica for a prompt.

    A replica that has at least half of the prompt's blocks, and the most, is preferred over a lower load, within
    limits: its load must be at most twice the lowest and below `max_num_seqs`, or at most `HEADROOM` above the
    lowest. Ties go to the first replica from `home` on, so that all frontends choose the same one.

    Args:
        loads: Number of sequences at each replica.
        num_cached: Number of the prompt's first blocks that each replica has.
        num_blocks: Number of full blocks of the prompt.
        home: Preferred replica for ties, modulo the number of replicas.
        max_num_seqs: Sequences that a replica runs at once.
    """
    least = min(loads)
    bound = max(least + HEADROOM, min(2 * least, max_num_seqs - 1))
    count = len(loads)

    def preference(index: int) -> tuple[int, int, int, int]:
        found = num_cached[index]
        worth_a_wait = found if 2 * found >= num_blocks else 0
        return -worth_a_wait, loads[index], -found, (index - home) % count

    return min((index for index in range(count) if loads[index] <= bound), key=preference)
