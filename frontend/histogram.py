"""A Prometheus histogram that takes many observations at once."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..protocol.arrays import Int64Array


class Histogram(msgspec.Struct):
    """Counts observations by upper bound, inclusive; the last count is of those above every bound."""

    bounds: npt.NDArray[np.float64]
    counts: Int64Array
    sum: float = 0.0

    @classmethod
    def with_bounds(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(np.array(bounds), np.zeros(len(bounds) + 1, np.int64))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[self.bounds.searchsorted(value)] += times
        self.sum += value * times

    def observe_all(self, values: npt.ArrayLike) -> None:
        array = np.asarray(values, np.float64)
        buckets = self.bounds.searchsorted(array)
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.sum += float(array.sum())

    def add(self, other: Histogram) -> None:
        """Count what `other`, of the same bounds, has counted."""
        self.counts = self.counts + other.counts
        self.sum += other.sum

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as the exposition format wants them."""
        bounds = [*map(str, self.bounds.tolist()), "+Inf"]
        return list(zip(bounds, self.counts.cumsum().tolist(), strict=True))


def decimal_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [float(decade * step) for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return tuple(bounds)
