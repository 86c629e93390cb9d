"""Helpers to wait for and inspect processes."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Return whether `condition` becomes true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def running_children() -> set[psutil.Process]:
    """Return the children of this process that run. Zombies may be its children because their parents have exited."""
    return {child for child in psutil.Process().children() if is_running(child.pid)}


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
