"""Find processes that hang, and kill them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...protocol.config import RecoveryConfig
from ...protocol.heartbeat import BEAT_INTERVAL_S
from .child import Child


class HangWatch:
    """Kills processes that hang, or that still run when they should have exited."""

    def __init__(self, limits: RecoveryConfig) -> None:
        self._limits = limits
        self._last_look = time.monotonic()

    def kill_hung(self, children: Iterable[Child], now: float) -> None:
        """Look at the heartbeats that were read. `now` is in CLOCK_MONOTONIC seconds."""
        # A suspended supervisor reads no heartbeats, so time in suspension does not count against its children.
        lost_s = max(0.0, now - self._last_look - 2 * BEAT_INTERVAL_S)
        self._last_look = now
        for child in children:
            if not child.alive:
                continue
            child.last_beat += lost_s
            child.hang = child.hang or child.find_hang(
                now, self._limits.heartbeat_timeout_s, self._limits.step_timeout_s
            )
            if child.hang or (child.kill_at is not None and now > child.kill_at):
                child.kill()
