"""A harness whose scheduler is recorded, and the dump of its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from engine.core.replay.dump import Dump, make_dump
from engine.core.replay.log import EventLog
from engine.core.replay.recorder import RecordedScheduler
from engine.core.replay.replayer import Replayer
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.worker_messages import SchedulerOutput
from support.scheduler.harness import Harness


class TransparentRecorder(RecordedScheduler):
    """A recorder that gives tests access to its scheduler."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def schedule(self, now: float) -> SchedulerOutput | None:
        self.end_turn()
        return super().schedule(now)


class PlanningScheduler(Scheduler):
    """A scheduler that plans every step, even one that repeats the previous one."""

    def _repeat_step(self, now: float) -> SchedulerOutput | None:
        return None


class RecordedHarness(Harness):
    """A harness whose scheduler's decisions can be replayed."""

    LOADED = ()

    def __init__(self, *, segment_bytes: int = 1 << 40, **settings: Any) -> None:
        self._segment_bytes = segment_bytes
        super().__init__(**settings)

    def _make_scheduler(self) -> TransparentRecorder:
        return TransparentRecorder(
            self._setup,
            structured_output=self.grammar,
            log_kv_events=self._log_kv_events,
            kv_connector=self.connector,
            encoder_cache_connector=self._encoder_connector,
            log=EventLog(self._segment_bytes),
        )

    def dump(self) -> Dump:
        """Return the recorded events as read from a file."""
        recorder = self.scheduler
        dump = make_dump(recorder.log, recorder.setup, reason="test", wall_time=0.0, now=self.now)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(dump), type=Dump)


def replay(dump: Dump, scheduler_class: Callable[..., Scheduler] | None = None) -> list[int]:
    """Replay every segment. Return the number of decisions in each that equal the recorded ones."""
    numbers = []
    for segment in dump.segments:
        replayer = Replayer(dump.setup, segment, scheduler_class)
        for _ in replayer.run():
            pass
        numbers.append(replayer.num_decisions)
    return numbers
