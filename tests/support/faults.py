"""What can befall a process, done to it from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil


def environment_with(directory: str) -> dict[str, str]:
    """In which every process of a server begins with the `sitecustomize` of a directory beside this file."""
    path = [str(Path(__file__).parent / directory), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


ENVIRONMENT: Final = environment_with("raise_on_signal")
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
