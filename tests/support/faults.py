"""What can befall a process, done to it from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

_path = [str(Path(__file__).parent / "raise_on_signal"), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT: Final = {"PYTHONPATH": os.pathsep.join(filter(None, _path))}
"""A server needs it for `fail` and `damage`."""


def fail(process: psutil.Process) -> None:
    """Raise an exception in the main thread, between two bytecodes."""
    process.send_signal(signal.SIGRTMIN)


def damage(worker: psutil.Process) -> None:
    """From now on a worker on `--device null` answers every step with tokens that do not exist."""
    worker.send_signal(signal.SIGRTMIN + 1)


def exhaust_memory(process: psutil.Process) -> None:
    """From now on the system gives it no more; it may live for as long as it needs none."""
    process.rlimit(psutil.RLIMIT_AS, (1, psutil.RLIM_INFINITY))


FAULTS: Final[dict[str, Callable[[psutil.Process], None]]] = {
    "killed": psutil.Process.kill,
    "stopped": psutil.Process.suspend,
    "failing": fail,
    "out of memory": exhaust_memory,
}
