"""Scheduler classes, as users write them for `--scheduler-cls`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from engine.core.scheduler.interface import SchedulerInterface
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.worker_messages import SchedulerOutput


class EverySecondCall(Scheduler):
    """A scheduler that schedules nothing at every second call while requests wait."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.num_calls = 0

    def schedule(self, now: float) -> SchedulerOutput | None:
        self.num_calls += 1
        if self.num_calls % 2 and self.get_request_counts()[1]:
            return None
        return super().schedule(now)


class Incomplete(SchedulerInterface):
    """A class without the methods of a scheduler."""

    @abstractmethod
    def one_more(self) -> None: ...


def _delegate(name: str) -> Callable[..., Any]:
    return lambda self, *args, **keywords: getattr(self.inner, name)(*args, **keywords)


def _make_inner(self: Any, *args: Any, **keywords: Any) -> None:
    self.inner = Scheduler(*args, **keywords)
    self.invariant_violations = self.inner.invariant_violations


Wrapper = type(
    "Wrapper",
    (SchedulerInterface,),
    {
        "__init__": _make_inner,
        **{name: _delegate(name) for name in SchedulerInterface.__abstractmethods__},
    },
)
"""Implements the interface without deriving from the scheduler."""

NOT_A_CLASS = 5
