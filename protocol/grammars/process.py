"""Starts grammar processes on behalf of a process that uses grammars."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from .messages import (
    CHECK_STACK_BYTES,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_WALL_S,
    Exited,
)

_MIB = 1 << 20


class GrammarProcesses:
    """Starts grammar processes through a fork server that has the tokenizer loaded. Thread-safe.

    The tokenizer's path may be a function that returns it. The fork server starts with the first process, or by
    `start`.
    """

    def __init__(
        self,
        tokenizer_path: str | Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._numbers = [str(vocab_size), *map(str, eos_token_ids)]
        self._lock = threading.Lock()
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the fork server if it is not running. Raise OSError if the system refuses."""
        with self._lock:
            self._start()

    def spawn(self) -> socket.socket:
        """Return a socket to a new process, which ends when the socket is closed. Raise OSError on failure."""
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
        """End the fork server and every grammar process."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _start(self) -> socket.socket:
        if self._is_closed:
            raise BrokenPipeError("the fork server is closed")
        if self._control is None:
            path = self._tokenizer_path
            control, other = socket.socketpair()
            with other:
                self._fork_server = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        f"{__package__}.fork_server",
                        str(other.fileno()),
                        path() if callable(path) else path,
                        *self._numbers,
                    ],
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


def describe_exit(exited: Exited | None) -> str:
    """Return which limit a grammar exceeded when its process was lost. None means an unknown cause."""
    match exited.signal if exited is not None else None:
        case signal.SIGPROF:
            return f"takes more than {MAX_CPU_S} s of processor time; use a smaller one"
        case signal.SIGALRM:
            return f"takes more than {MAX_WALL_S} s; use a smaller one"
        case signal.SIGABRT | signal.SIGKILL:
            return f"needs more than {MAX_MEMORY_BYTES // _MIB} MiB of memory; use a smaller one"
        case signal.SIGSEGV | signal.SIGBUS:
            return (
                f"is nested too deeply: it needs more than {CHECK_STACK_BYTES // _MIB} MiB of stack; "
                "use fewer levels of rules, references or nesting"
            )
        case _:
            return "cannot be compiled: its process was lost"
