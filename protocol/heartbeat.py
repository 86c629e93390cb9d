"""Heartbeats, by which each process shows the supervisor, or the agent of its node, that it does not hang.

A process writes its heartbeats to a record (`shared_record.py`), which its supervisor reads twice a second. So a
heartbeat wakes no other thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from .config import EngineConfig
from .shared_record import RecordReader, RecordWriter
from .supervisor_messages import Heartbeat
from .transport import UNREADABLE, StatusReporter

BEAT_INTERVAL_S: Final = 0.5
"""Seconds between two heartbeats."""

WRITING_S: Final = 0.01
"""Seconds that processes have to write their heartbeats before the supervisor reads them."""


def seconds_to_beat(interval_s: float = BEAT_INTERVAL_S) -> float:
    """Return the seconds until the next heartbeat, or until the next multiple of another interval.

    Processes of a machine send their heartbeats and do other periodic work at the same times. An idle processor then
    wakes up less often, and what several need is still in its caches.
    """
    return interval_s - time.monotonic() % interval_s


def seconds_to_read() -> float:
    """Return the seconds until the processes of this machine have written their next heartbeats."""
    return seconds_to_beat() + WRITING_S


class HeartbeatWriter:
    """Writes the heartbeats of one process.

    Raises:
        RunDirectoryError: The record cannot be created.
    """

    def __init__(self, config: EngineConfig, process: str) -> None:
        self._process = process
        self._record = RecordWriter(config.heartbeat_path(process))

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat, in which process, pid and is_ready are filled in."""
        self._record.write(
            msgspec.structs.replace(
                heartbeat, process=self._process, pid=os.getpid(), is_ready=StatusReporter.is_ready
            )
        )

    def close(self) -> None:
        """Close the record, which remains."""
        self._record.close()


class HeartbeatReader:
    """Reads the heartbeats of processes of this machine.

    Args:
        config: The configuration of the processes.
        processes: Their names.
    """

    def __init__(self, config: EngineConfig, processes: Iterable[str]) -> None:
        self._records = [
            RecordReader(config.heartbeat_path(process), Heartbeat) for process in processes
        ]
        self.num_dropped_frames = 0

    def read(self) -> Iterator[tuple[Heartbeat, float]]:
        """Yield the newest heartbeat of each process, if it was not read before, and its time (CLOCK_MONOTONIC)."""
        for record in self._records:
            try:
                heartbeat = record.read()
            except UNREADABLE:
                self.num_dropped_frames += 1
                continue
            if heartbeat is not None:
                yield heartbeat, record.written_at

    def close(self) -> None:
        """Close the records."""
        for record in self._records:
            record.close()


class Pulse:
    """Sends heartbeats from a separate thread until the process exits.

    It is for processes whose main thread may spend a long time in one call. The main thread calls `begin_step` and
    `end_step`. It may set `count_dropped_frames`, a function whose result is reported.
    """

    def __init__(self, config: EngineConfig, process: str) -> None:
        self._num_steps = 0
        self._step_began: float | None = None
        self.count_dropped_frames: Callable[[], int] = int
        self._heartbeats = HeartbeatWriter(config, process)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        """Record that the current step ended."""
        self._step_began = None
        self._num_steps += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let a call outside steps count as a hang if it takes longer than a step may take."""
        began, self._step_began = self._step_began, self._step_began or time.monotonic()
        yield
        self._step_began = began

    def _beat(self) -> None:
        while True:
            began = self._step_began
            busy_s = 0.0 if began is None else time.monotonic() - began
            num_dropped = self.count_dropped_frames()
            self._heartbeats.beat(
                Heartbeat(num_steps=self._num_steps, busy_s=busy_s, num_dropped_frames=num_dropped)
            )
            time.sleep(seconds_to_beat())
