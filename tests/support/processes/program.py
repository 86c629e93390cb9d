"""A program under test, whose output is read continuously and which ends with its test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil
from support.processes.forked import ForkedProcess

START_TIMEOUT_S = 240.0
"""Long enough for a large model on a slow machine, but within the limit of a test."""

STOP_TIMEOUT_S = 40.0


def wait_until(condition: Any, timeout_s: float = 60.0, what: str = "the condition") -> None:
    """Poll `condition` until it is true, less often if it takes long; fail with `what` after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"{what} did not come true in {timeout_s} s"
        time.sleep(min(0.02 + waited_s / 10, 0.1))


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has exited. A zombie counts, because its new parent may reap it late."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int) -> list[psutil.Process]:
    """Return the children of a process, and their children.

    psutil does the same, but reads a file of each process of the machine.
    """
    if not Path("/proc/thread-self/children").exists():
        return psutil.Process(pid).children(recursive=True)
    found: list[psutil.Process] = []
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        # A process or a thread may exit in between.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            for child in path.read_text().split():
                found += [psutil.Process(int(child)), *descendants(int(child))]
    return found


class Program:
    """A program that the constructor starts; use it as a context manager, which terminates it.

    A module of Python is forked from a process that has its libraries, unless `env` has an empty PYTHONPATH.
    """

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        environment = {**os.environ, **env}
        self.process: subprocess.Popen[str] | ForkedProcess
        if command[:2] == [sys.executable, "-m"] and env.get("PYTHONPATH") != "":
            customized = ["support.processes.customized"] if "PYTHONPATH" in env else []
            self.process = ForkedProcess([*customized, *command[2:]], environment)
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.output)

    def wait_for(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until `text` is in the output; fail if the program exits without it."""

        def has_come() -> bool:
            if self.process.poll() is not None:
                self._reader.join(5)
                assert text in self.log, self.log
            return text in self.log

        wait_until(has_come, timeout_s, f"{text!r} in {self.log!r}")

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, return the exit code."""
        self.process.send_signal(signum)
        return self.wait()

    def signal_all(self, signum: int) -> None:
        """Send the signal to the program and all of its processes at once, as service managers and `pkill` do."""
        # The parent is last, because the others may exit with it.
        for process in [*reversed(descendants(self.process.pid)), self.process]:
            process.send_signal(signum)

    def wait(self) -> int:
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {STOP_TIMEOUT_S} s: {self.log}") from None
        self._reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.wait()
            except AssertionError:
                self.process.kill()
                self.process.wait()
                raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
