"""When the steps of a replayed log were sent and how long each took."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .events import Schedule, Update
from .replayer import Moment


class TimedStep(msgspec.Struct):
    """A step: when it was sent, and how much it computed. `seconds` is None until its output is back."""

    number: int
    sent_at: float
    num_tokens: int
    num_sequences: int
    seconds: float | None = None


class StepTimeline:
    """Follows a replay. `in_flight` are the steps without an output yet, in order."""

    def __init__(self) -> None:
        self.in_flight: list[TimedStep] = []
        self._last_end = 0.0

    def watch(self, moment: Moment, counts: Sequence[int] | None) -> TimedStep | None:
        """Apply a moment; `counts` are the tokens of each row of the step that it scheduled.

        Returns the step that was sent or whose output came, if it did either.
        """
        match moment.event:
            case Schedule(now) if moment.step is not None:
                counts = counts or ()
                step = TimedStep(moment.step.step, now, sum(counts), len(counts))
                self.in_flight.append(step)
                return step
            case Update(now, result):
                began, self._last_end = self._last_end, now
                # A step that was sent before the log begins is not known.
                for step in self.in_flight:
                    if step.number == result.step:
                        self.in_flight.remove(step)
                        # The workers execute one step after the other.
                        step.seconds = now - max(step.sent_at, began)
                        return step
        return None
