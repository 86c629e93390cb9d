"""Faults that tests cause in processes: kills, hangs, exceptions and lack of memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil


def environment_with(directory: str) -> dict[str, str]:
    """Return an environment in which Python imports the `sitecustomize` of a directory beside this file."""
    path = [str(Path(__file__).parent / directory), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


ENVIRONMENT: Final = environment_with("raise_on_signal")
"""The environment that a server needs for `fail` and `damage`."""


def fail(process: psutil.Process) -> None:
    """Raise an exception in the main thread, between two bytecodes."""
    process.send_signal(signal.SIGRTMIN)


def damage(worker: psutil.Process) -> None:
    """Make a worker on `--device null` return invalid tokens from now on."""
    worker.send_signal(signal.SIGRTMIN + 1)


def exhaust_memory(process: psutil.Process) -> None:
    """Make all further allocations of memory fail. The process may continue while it needs none."""
    process.rlimit(psutil.RLIMIT_AS, (1, psutil.RLIM_INFINITY))


FAULTS: Final[dict[str, Callable[[psutil.Process], None]]] = {
    "killed": psutil.Process.kill,
    "stopped": psutil.Process.suspend,
    "failing": fail,
    "out of memory": exhaust_memory,
}
