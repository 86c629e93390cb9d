"""The times that requests and tokens spend in a frontend, measured from an event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import float32_view
from ..replay.dump import Dump
from ..replay.events import AddRequest
from ..state.slots import Float64Array


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

    def draw_delivery(self) -> Callable[[int], Float64Array]:
        """Return a function that returns the next delivery times, which are drawn at random with a fixed seed."""
        if not self.delivery:
            return np.zeros
        rng = np.random.default_rng(0)
        times = np.array(self.delivery)
        return lambda count: rng.choice(times, count)


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
