"""Detect timers that fire late, because the process was suspended."""

from __future__ import annotations

import asyncio
from typing import Final

LATE_S: Final = 1.0
"""Seconds after which a timer is late. The event loop of a process that runs is hardly blocked for that long."""


def is_late(timer: asyncio.TimerHandle) -> bool:
    """Return whether a timer that fires now is late.

    Then the process did not run for a while, as when its container is paused. Timers fire before the loop reads what
    clients have sent meanwhile, so a client is not slow yet.
    """
    return asyncio.get_running_loop().time() - timer.when() > LATE_S
