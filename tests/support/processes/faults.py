"""Faults that tests cause in processes: kills, hangs, exceptions and lack of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

PASSING_S: Final = 2.0
"""Seconds after which a fault that passes has ended."""


def environment_with(directory: str) -> dict[str, str]:
    """Return an environment in which Python imports the `sitecustomize` of a directory in `customizations`."""
    path = [
        str(Path(__file__).parent / "customizations" / directory),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


ENVIRONMENT: Final = environment_with("raise_on_signal")
"""The environment that a server needs for `fail` and `damage`."""


def fail(process: psutil.Process) -> None:
    """Raise an exception in the main thread, between two bytecodes."""
    process.send_signal(signal.SIGRTMIN)


def crash(process: psutil.Process) -> None:
    """End a process as a fault in native code does."""
    process.send_signal(signal.SIGSEGV)


def damage(worker: psutil.Process) -> None:
    """Make a worker on `--device null` return invalid tokens from now on."""
    worker.send_signal(signal.SIGRTMIN + 1)


def exhaust_memory(process: psutil.Process) -> None:
    """Make all further allocations of memory fail. The process may continue while it needs none."""
    process.rlimit(psutil.RLIMIT_AS, (1, psutil.RLIM_INFINITY))


def pause(process: psutil.Process) -> None:
    """Suspend a process for some time."""
    process.suspend()
    _later(process.resume)


def lack_memory(process: psutil.Process) -> None:
    """Make allocations of memory fail for some time."""
    exhaust_memory(process)
    unlimited = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
    _later(lambda: process.rlimit(psutil.RLIMIT_AS, unlimited))


def _later(end: Callable[[], object]) -> None:
    """End a fault, unless the process has exited."""

    def run() -> None:
        with contextlib.suppress(psutil.Error):
            end()

    timer = threading.Timer(PASSING_S, run)
    timer.daemon = True
    timer.start()


FAULTS: Final[dict[str, Callable[[psutil.Process], None]]] = {
    "killed": psutil.Process.kill,
    "stopped": psutil.Process.suspend,
    "paused": pause,
    "crashed": crash,
    "failing": fail,
    "out of memory": lack_memory,
}
