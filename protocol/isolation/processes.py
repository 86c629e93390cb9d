"""Start disposable processes for the process that uses them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence


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
        """Return a socket to a new process, which exits when the socket is closed. Raise OSError on failure."""
        own, other = socket.socketpair()
        with other:
            try:
                with self._lock:
                    try:
                        socket.send_fds(self._start(), [b"+"], [other.fileno()])
                    except (BrokenPipeError, ConnectionResetError):
                        self._stop()
                        socket.send_fds(self._start(), [b"+"], [other.fileno()])
            except BaseException:
                own.close()
                raise
        return own

    def close(self) -> None:
        """Stop the fork server and all processes."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _start(self) -> socket.socket:
        if self._is_closed:
            raise BrokenPipeError("the fork server is closed")
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
