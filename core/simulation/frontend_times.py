"""The times that requests and tokens spend in a frontend, measured from an event log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from ...protocol.arrays import float32_view
from ..replay.dump import Dump
from ..replay.events import AddRequest
from ..state.slots import Float64Array

_DRAWN_AT_ONCE: Final = 256


class FrontendTimes(NamedTuple):
    """Recorded times in seconds, in the order of the log.

    `submission` are from the arrival of a request at a frontend to its arrival at the core: tokens are counted, hashed
    and sent. `delivery` are from the end of a step to the write of its tokens to a client.
    """

    submission: tuple[float, ...] = ()
    delivery: tuple[float, ...] = ()

    def draw_submission(self, count: int) -> list[float]:
        """Return the submission times of a number of requests: the recorded ones in order, or zeros."""
        times: list[float] = np.resize(self.submission or 0.0, count).tolist()
        return times

    def delivery_times(self, index: int) -> DeliveryTimes:
        """Return the delivery times of a replica."""
        return DeliveryTimes(self.delivery, index)


class DeliveryTimes:
    """Returns delivery times, which are drawn at random; zeros if none were recorded.

    Args:
        times: The recorded times in seconds.
        seed: The seed of the random draws.
    """

    def __init__(self, times: tuple[float, ...], seed: int) -> None:
        self._times = np.array(times)
        self._seed = seed
        self._drawn: Float64Array = np.zeros(0)
        self._next = 0
        self._rng: np.random.Generator | None = None

    def take(self, count: int) -> Float64Array:
        """Return the next times."""
        if not len(self._times):
            return np.zeros(count)
        if self._next + count > len(self._drawn):
            if self._rng is None:
                self._rng = np.random.default_rng(self._seed)
            # Single draws would be slow.
            drawn = self._rng.choice(self._times, max(count, _DRAWN_AT_ONCE))
            self._drawn = np.concatenate([self._drawn[self._next :], drawn])
            self._next = 0
        self._next += count
        return self._drawn[self._next - count : self._next]


NO_FRONTEND = FrontendTimes()


def measure_frontend(dumps: Iterable[Dump]) -> FrontendTimes:
    """Return the times in these logs."""
    submission: list[float] = []
    delivery: list[float] = []
    for dump in dumps:
        for segment in dump.segments:
            for event in segment.events:
                if isinstance(event, AddRequest) and not event.message.is_resubmitted:
                    submission.append(max(event.now - event.message.arrival_time, 0.0))
                    delivery += float32_view(event.message.delivery_times).tolist()
    return FrontendTimes(tuple(submission), tuple(delivery))
