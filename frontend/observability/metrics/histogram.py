"""A Prometheus histogram with fast bulk observations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Final

import msgspec

FEW: Final = 8
"""Number of different values up to which counting each of them is faster than observing all."""


class Histogram(msgspec.Struct):
    """Counts of observations by inclusive upper bound. The last count is for values above every bound."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def with_bounds(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return an empty histogram with these bounds."""
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as `times` observations."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Sequence[float]) -> None:
        """Count all values. This is fast if few are different, as the intervals between the tokens of two steps."""
        different = set(values)
        if len(different) > FEW:
            for value in values:
                self.observe(value)
        else:
            for value in different:
                self.observe(value, values.count(value))

    def add_counts(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = list(map(add, self.counts, other.counts))
        self.sum += other.sum

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """Return pairs of upper bound and number of observations up to it, for the exposition format."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


def decimal_bounds(limit: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [float(decade * step) for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return tuple(bounds)
