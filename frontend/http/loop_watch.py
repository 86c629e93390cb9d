"""Heartbeats of a process with an event loop, from a thread that distinguishes a busy loop from a hanging one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from ...protocol.heartbeat import BEAT_INTERVAL_S, seconds_to_beat
from ...protocol.supervisor_messages import Heartbeat
from ...protocol.transport import StatusReporter

BUSY_SHARE: Final = 0.02
"""A loop that does not respond, and uses less than this share of a processor core, counts as hanging."""


class LoopWatch:
    """Sends heartbeats while the event loop responds or computes, and none while it hangs.

    While a callback blocks the loop by computing, heartbeats continue, and report for how many seconds the loop has
    been busy. The watch must be created in the loop's thread. It owns `reporter` from then on.
    """

    def __init__(self, reporter: StatusReporter, count_dropped_frames: Callable[[], int]) -> None:
        self._reporter = reporter
        self._count_dropped_frames = count_dropped_frames
        self._loop = asyncio.get_running_loop()
        self._cpu_clock = _cpu_clock_of_this_thread()
        self._answered = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        asked_at = cpu_s = 0.0
        self._answered.set()
        while not self._is_closed.is_set():
            now, cpu_before_s = time.monotonic(), cpu_s
            cpu_s = self._cpu_s()
            has_answered = self._answered.is_set()
            if has_answered or cpu_s - cpu_before_s > BUSY_SHARE * BEAT_INTERVAL_S:
                busy_s = 0.0 if has_answered else now - asked_at
                num_dropped = self._count_dropped_frames()
                self._reporter.beat(Heartbeat(busy_s=busy_s, num_dropped_frames=num_dropped))
            if has_answered:
                self._answered.clear()
                asked_at = now
                try:
                    self._loop.call_soon_threadsafe(self._answered.set)
                except RuntimeError:
                    break
            self._is_closed.wait(seconds_to_beat())
        self._reporter.close()

    def _cpu_s(self) -> float:
        """Return the processor time of the loop's thread in seconds.

        If the platform does not report it, return the wall time, so that the loop always counts as busy.
        """
        return time.monotonic() if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)


def _cpu_clock_of_this_thread() -> int | None:
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())
