"""Start disposable processes for the process that uses them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from .messages import GREETING

START_S: Final = 30.0
"""Seconds within which a fork server must load everything and fork a process."""

LOOK_S: Final = 0.5
"""Seconds between two looks at a fork server during which nothing arrives."""

MAX_TRIES: Final = 3
"""Maximum number of processes that get an input, if they end for reasons that may not be its fault."""


class IsolatedProcesses:
    """Starts processes through a fork server that has loaded everything that they need. Thread-safe.

    The fork server starts with the first process, or by a call of `start`.

    Args:
        module: The program of the fork server, which gets the number of its socket as the first argument.
        arguments: A function that returns the program's other arguments.
    """

    def __init__(self, module: str, arguments: Callable[[], Sequence[str]]) -> None:
        self._module, self._arguments = module, arguments
        self._lock = threading.Lock()
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the fork server if it is not running. Raise OSError if that fails."""
        with self._lock:
            self._start()

    def spawn(self) -> socket.socket:
        """Return a socket to a new process, which exits when the socket is closed. Raise OSError on failure.

        A fork server that has exited, or that does not fork in time, is replaced.
        """
        for _ in range(MAX_TRIES - 1):
            with contextlib.suppress(ConnectionError, TimeoutError):
                return self._spawn()
        return self._spawn()

    @property
    def is_stopped(self) -> bool:
        """True if the fork server is stopped."""
        with self._lock:
            return self._fork_server is not None and _is_stopped(self._fork_server)

    def _spawn(self) -> socket.socket:
        own, other = socket.socketpair()
        fork_server: subprocess.Popen[bytes] | None = None
        try:
            with other, self._lock:
                control = self._start()
                fork_server = self._fork_server
                socket.send_fds(control, [GREETING], [other.fileno()])
            _await_greeting(own, fork_server)
        except BaseException as error:
            own.close()
            if isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError):
                with self._lock:
                    # Another thread may have replaced it.
                    if self._fork_server is fork_server:
                        self._stop()
            raise
        return own

    def close(self) -> None:
        """Stop the fork server and all processes."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _start(self) -> socket.socket:
        if self._is_closed:
            raise OSError("the fork server is closed")
        if self._control is None:
            control, other = socket.socketpair()
            with other:
                self._fork_server = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(other.fileno()), *self._arguments()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                )
            self._control = control
        return self._control

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.wait()
            self._fork_server = None


def _await_greeting(process: socket.socket, fork_server: subprocess.Popen[bytes] | None) -> None:
    """Wait until a new process is ready.

    Raises:
        TimeoutError: It takes too long, or the fork server is stopped.
        ConnectionResetError: The fork server has exited.
        ConnectionAbortedError: The process has exited.
    """
    deadline = time.monotonic() + START_S
    process.settimeout(LOOK_S)
    while True:
        try:
            greeting = process.recv(1)
            break
        except TimeoutError:
            if time.monotonic() > deadline or (
                fork_server is not None and _is_stopped(fork_server)
            ):
                raise
    if not greeting:
        raise ConnectionResetError("the fork server has exited")
    if greeting != GREETING:
        raise ConnectionAbortedError("the process has exited")
    process.settimeout(None)


def _is_stopped(child: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(ChildProcessError):
        flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, child.pid, flags) is not None
    return False


def is_idle(process: socket.socket) -> bool:
    """Return whether a process has sent nothing since its last reply. Otherwise it has exited, or is about to."""
    process.setblocking(False)
    try:
        process.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
