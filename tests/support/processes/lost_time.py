"""Time in which programs could not run because the machine was busy, so that tests blame a server only for its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def lost_time_s(pids: Iterable[int]) -> float:
    """Return how long the threads of the processes have waited for a processor, and the machine for its host.

    Only differences between two calls mean something. See proc_pid_schedstat(5) and proc_stat(5). Without such
    statistics the result is 0, and a test can fail because the machine is busy.
    """
    num_ns = sum(_queue_ns(pid) for pid in {*pids, os.getpid()})
    return num_ns / 1e9 + _num_stolen_ticks() / _TICKS_PER_S


def _queue_ns(pid: int) -> int:
    num_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            num_ns += int(path.read_text().split()[1])
        except OSError:
            # The thread has ended.
            continue
    return num_ns


def _num_stolen_ticks() -> int:
    try:
        return int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    except OSError:
        return 0
