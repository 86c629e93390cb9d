"""Heartbeats of a process with an event loop, from a thread that distinguishes a busy loop from a hanging one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from ...protocol.heartbeat import BEAT_INTERVAL_S, WRITING_S, HeartbeatWriter, seconds_to_beat
from ...protocol.supervisor_messages import Heartbeat

BUSY_SHARE: Final = 0.02
"""A loop that does not respond, and uses less than this share of a processor core, counts as hanging."""

TIMER_S: Final = 0.001
"""Resolution of the loop's timers in seconds."""

ANSWERING_S: Final = WRITING_S / 2
"""Seconds that an idle loop has to answer, of those that processes have to write a heartbeat."""


class LoopWatch:
    """Sends heartbeats while the event loop responds or computes, and none while it hangs.

    While a callback blocks the loop by computing, heartbeats continue, and report for how many seconds the loop has
    been busy. The watch must be created in the loop's thread. It owns `heartbeats` from then on.
    """

    def __init__(
        self, heartbeats: HeartbeatWriter, count_dropped_frames: Callable[[], int]
    ) -> None:
        self._heartbeats = heartbeats
        self._count_dropped_frames = count_dropped_frames
        self._loop = asyncio.get_running_loop()
        self._cpu_clock = _cpu_clock_of_this_thread()
        self._answered_at = time.monotonic()
        self._timer = self._loop.call_later(seconds_to_beat(), self._answer)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._timer.cancel()
        self._is_closed.set()
        self._thread.join()

    def _answer(self) -> None:
        self._answered_at = time.monotonic()
        # A timer may fire a little early.
        self._timer = self._loop.call_later(seconds_to_beat() + TIMER_S, self._answer)

    def _watch(self) -> None:
        cpu_s = 0.0
        while not self._is_closed.is_set():
            silent_s = time.monotonic() - self._answered_at
            cpu_before_s, cpu_s = cpu_s, self._cpu_s()
            has_answered = silent_s < BEAT_INTERVAL_S
            if has_answered or cpu_s - cpu_before_s > BUSY_SHARE * BEAT_INTERVAL_S:
                busy_s = 0.0 if has_answered else silent_s
                num_dropped = self._count_dropped_frames()
                self._heartbeats.beat(Heartbeat(busy_s=busy_s, num_dropped_frames=num_dropped))
            # The loop answers before this thread looks.
            self._is_closed.wait(seconds_to_beat() + ANSWERING_S)
        self._heartbeats.close()

    def _cpu_s(self) -> float:
        """Return the processor time of the loop's thread in seconds.

        If the platform does not report it, return the wall time, so that the loop always counts as busy.
        """
        return time.monotonic() if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)


def _cpu_clock_of_this_thread() -> int | None:
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())
