"""A Prometheus histogram that takes many observations at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from operator import add

import msgspec


class Histogram(msgspec.Struct):
    """Counts observations by upper bound, inclusive; the last count is of those above every bound."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def with_bounds(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Iterable[float]) -> None:
        """Cheap where many of them are equal, as the intervals between the tokens of two steps are."""
        for value, times in Counter(values).items():
            self.observe(value, times)

    def add(self, other: Histogram) -> None:
        """Count what `other`, of the same bounds, has counted."""
        self.counts = list(map(add, self.counts, other.counts))
        self.sum += other.sum

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as the exposition format wants them."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


def decimal_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [float(decade * step) for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return tuple(bounds)
