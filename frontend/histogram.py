"""A Prometheus histogram that takes many observations at once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt


class Histogram:
    """Counts observations by upper bound, inclusive; the last count is of those above every bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0
        self._bounds_array = np.array(bounds)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: npt.ArrayLike) -> None:
        array = np.asarray(values, np.float64)
        buckets = self._bounds_array.searchsorted(array)
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.sum += float(array.sum())

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as the exposition format wants them."""
        bounds = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(bounds, self.counts.cumsum().tolist(), strict=True))


def decimal_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [float(decade * step) for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return tuple(bounds)
