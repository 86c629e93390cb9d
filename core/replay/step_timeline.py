"""Record when the steps of a replayed log were sent, and how long each took."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .events import Schedule, Update
from .replayer import Moment


class TimedStep(msgspec.Struct):
    """A step, the time when it was sent in seconds, and its size. `seconds` is None until its output has arrived."""

    number: int
    sent_at: float
    num_tokens: int
    num_sequences: int
    seconds: float | None = None


class StepTimeline:
    """Tracks the steps of a replay. `in_flight` lists the steps without an output, oldest first."""

    def __init__(self) -> None:
        self.in_flight: list[TimedStep] = []
        self._last_end = 0.0

    def apply_moment(self, moment: Moment, counts: Sequence[int] | None) -> TimedStep | None:
        """Process an event that was replayed.

        Args:
            moment: The event and its results.
            counts: The tokens of each row of the step that the moment scheduled.

        Returns:
            The step that was sent or whose output arrived, or None.
        """
        match moment.event:
            case Schedule(now) if moment.step is not None:
                counts = counts or ()
                step = TimedStep(moment.step.step, now, sum(counts), len(counts))
                self.in_flight.append(step)
                return step
            case Update(now, result):
                began, self._last_end = self._last_end, now
                # A step that was sent before the log begins is unknown here.
                for step in self.in_flight:
                    if step.number == result.step:
                        self.in_flight.remove(step)
                        # Workers execute steps one after the other.
                        step.seconds = now - max(step.sent_at, began)
                        return step
        return None
