"""A frontend's record of the prompt prefixes that a core has cached, and of the LoRA adapters that it has loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from ..arrays import uint64_view
from ..messages import ReplicaLoadUpdate


class CachedPrefixes:
    """The keys of the blocks and LoRA adapters that a core has, or will have after its current sequences."""

    def __init__(self) -> None:
        self._stored: set[int] = set()
        self._expected: Counter[int] = Counter()

    def apply_update(self, update: ReplicaLoadUpdate) -> None:
        """Apply a core's report of stored and removed blocks."""
        if update.is_whole:
            self._stored.clear()
        self._stored.update(uint64_view(update.stored).tolist())
        self._stored.difference_update(uint64_view(update.removed).tolist())

    def clear(self) -> None:
        """Remove the stored keys, because the core was restarted.

        The keys of its sequences stay expected, because the sequences are resubmitted to it.
        """
        self._stored.clear()

    def add_expected(self, keys: Iterable[int]) -> None:
        """Add the keys of a sequence that was sent to the core."""
        self._expected.update(keys)

    def remove_expected(self, keys: Iterable[int]) -> None:
        """Remove the keys of a sequence that has left the core."""
        expected = self._expected
        for key in keys:
            if expected[key] > 1:
                expected[key] -= 1
            else:
                del expected[key]

    def has(self, key: int) -> bool:
        """Return whether a block or an adapter is stored or expected."""
        return key in self._stored or key in self._expected

    def count_blocks(self, keys: Iterable[int]) -> int:
        """Return the number of a prompt's leading blocks that are stored or expected."""
        return sum(1 for _ in takewhile(self.has, keys))

    def count_stored(self, keys: Iterable[int]) -> int:
        """Return the number of a prompt's leading blocks that are stored."""
        return sum(1 for _ in takewhile(self._stored.__contains__, keys))
