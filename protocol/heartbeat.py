"""Send heartbeats from a separate thread, for processes whose main thread may spend a long time in one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from .config import EngineConfig
from .supervisor_messages import Heartbeat
from .transport import StatusReporter

BEAT_INTERVAL_S: Final = 0.5
"""Seconds between two heartbeats."""


def seconds_to_beat(interval_s: float = BEAT_INTERVAL_S) -> float:
    """Return the seconds until the next heartbeat, or until the next multiple of another interval.

    Processes of a machine send their heartbeats and do other periodic work at the same times. An idle processor then
    wakes up less often, and what several need is still in its caches.
    """
    return interval_s - time.monotonic() % interval_s


class Pulse:
    """Sends heartbeats to the supervisor until the process exits.

    The main thread calls `begin_step` and `end_step`. It may set `count_dropped_frames`, a function whose result is
    reported.
    """

    def __init__(self, context: zmq.Context[Any], config: EngineConfig, process: str) -> None:
        self._num_steps = 0
        self._step_began: float | None = None
        self.count_dropped_frames: Callable[[], int] = int
        arguments = context, config, process
        threading.Thread(target=self._beat, args=arguments, name="pulse", daemon=True).start()

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        """Record that the current step ended."""
        self._step_began = None
        self._num_steps += 1

    def _beat(self, context: zmq.Context[Any], config: EngineConfig, process: str) -> None:
        reporter = StatusReporter(context, config, process)
        while True:
            began = self._step_began
            busy_s = 0.0 if began is None else time.monotonic() - began
            num_dropped = self.count_dropped_frames()
            reporter.beat(
                Heartbeat(num_steps=self._num_steps, busy_s=busy_s, num_dropped_frames=num_dropped)
            )
            time.sleep(seconds_to_beat())
