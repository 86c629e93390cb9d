"""A harness whose scheduler is recorded, and the dump of what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from engine.core.event_dump import Dump, make_dump
from engine.core.event_log import EventLog
from engine.core.recorded_scheduler import RecordedScheduler, Setup
from engine.core.replayer import Replayer
from engine.core.scheduler import Scheduler
from engine.protocol.kv_cache_groups import FULL_ATTENTION
from support.scheduler_harness import Harness


class TransparentRecorder(RecordedScheduler):
    """Lets tests look at the scheduler inside."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


class RecordedHarness(Harness):
    """Everything that its scheduler does can be replayed."""

    def __init__(self, *, segment_bytes: int = 1 << 40, **settings: Any) -> None:
        super().__init__(**settings)
        self.scheduler = TransparentRecorder(
            Setup(
                self.config,
                self.cache_config,
                max_model_len=settings.get("max_model_len", 128),
                vocab_size=self.vocab_size,
                num_blocks=self.scheduler.kv_cache_manager.pool.num_blocks,
                num_host_blocks=settings.get("num_host_blocks", 0),
                kv_cache_groups=settings.get("groups", FULL_ATTENTION),
                speculative=self.speculative,
                kv_transfer=self.kv_transfer,
            ),
            structured_output=self.grammar,
            log_kv_events=settings.get("log_kv_events", False),
            kv_connector=settings.get("connector"),
            encoder_cache_connector=settings.get("encoder_connector"),
            log=EventLog(segment_bytes),
        )

    def dump(self) -> Dump:
        """What was recorded, as it is read from a file."""
        recorder = self.scheduler
        dump = make_dump(recorder.log, recorder.setup, reason="test", wall_time=0.0, now=self.now)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(dump), type=Dump)


def replay(dump: Dump, scheduler_class: Callable[..., Scheduler] = Scheduler) -> list[int]:
    """Replay every segment. Returns how many decisions of each were the recorded ones."""
    numbers = []
    for segment in dump.segments:
        replayer = Replayer(dump.setup, segment, scheduler_class)
        for _ in replayer.run():
            pass
        numbers.append(replayer.num_decisions)
    return numbers
