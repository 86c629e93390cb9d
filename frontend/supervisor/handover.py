"""The handover of a listening socket from a running engine to its successor, which may be another version.

A serving engine listens on a Unix socket in its run directory. Whoever connects receives one line of JSON, a
`ServedEngine`, together with the descriptors of the listening socket and of standard error. The successor answers with
the line `take` to ask the engine to stop accepting connections. The engine then finishes its requests and exits, which
closes the connection. If a successor closes the connection before it has sent `take`, the engine continues to serve.
After a crash of the supervisor, the successor connects to the one that replaces it. Only one successor at a time may
prepare: it holds the lock of a file in the run directory of the engine, with its process ID in that file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.errors import EngineError
from .run_dir import is_in_use, run_directories

SOCKET_NAME: Final = "handover"

SUCCESSOR_FILE: Final = "successor"
"""The file that a successor locks until it has exited, in the run directory of the engine that it replaces."""

TAKE: Final = b"take\n"

MAX_GREETING_BYTES: Final = 1 << 20
"""Maximum bytes of a greeting. Linux limits the arguments of a process to a few megabytes."""

MAX_PID_BYTES: Final = 20

GREETING_S: Final = 5.0
"""Maximum seconds that an engine takes to send its greeting. Its supervisor never blocks for longer."""


class HandoverFailed(EngineError):
    """No running engine could be taken over."""


class HandoverRequested(Exception):
    """A successor is ready and accepts connections from now on."""


class ServedEngine(msgspec.Struct, frozen=True):
    """The description that a running engine sends to a successor.

    Attributes:
        version: The version of Engine, for log lines.
        pid: The process ID of its supervisor.
        url: The URL that it serves.
        arguments: The arguments of `engine serve`, then the arguments of each `engine upgrade` since then.
        directory: The working directory, to which paths in `arguments` are relative.
    """

    version: str
    pid: int
    url: str
    arguments: list[list[str]]
    directory: str


class HandoverSocket:
    """The Unix socket of a running engine on which successors ask for its listening socket.

    `fd` is readable when `raise_if_requested` has something to do.
    """

    def __init__(self, run_dir: str, engine: ServedEngine, listener: socket.socket) -> None:
        self._greeting = msgspec.json.encode(engine) + b"\n"
        self._listening_fd = listener.fileno()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = Path(run_dir, SOCKET_NAME)
        # A supervisor that crashed has left its socket.
        self._path.unlink(missing_ok=True)
        self._socket.bind(str(self._path))
        self._socket.listen()
        self._socket.setblocking(False)
        self._successors: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def raise_if_requested(self) -> None:
        """Send the greeting to successors that have connected.

        Raise HandoverRequested if one takes the listening socket.
        """
        for fd, _ in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._greet()
            elif self._receive(fd) == TAKE:
                raise HandoverRequested

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            successor, _ = self._socket.accept()
            successor.setblocking(False)
            socket.send_fds(successor, [self._greeting], [self._listening_fd, sys.stderr.fileno()])
            self._epoll.register(successor.fileno(), select.EPOLLIN)
            self._successors[successor.fileno()] = successor

    def _receive(self, fd: int) -> bytes:
        """Return the messages of a successor. If it has closed the connection, drop it."""
        successor = self._successors[fd]
        try:
            received = successor.recv(len(TAKE))
        except OSError:
            received = b""
        if received != TAKE:
            self._epoll.unregister(fd)
            self._successors.pop(fd).close()
        return received

    def stop_listening(self) -> None:
        """Accept no more successors. Connected successors are notified when this process exits."""
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def close(self) -> None:
        """Close the socket and all connections."""
        self.stop_listening()
        for successor in self._successors.values():
            successor.close()
        self._epoll.close()


class Predecessor:
    """A running engine, as its successor sees it.

    Attributes:
        listener: The listening socket, which both processes have open.
        log_fd: The standard error of the engine, if its version sends that.
        engine: The description that the engine sent.
    """

    def __init__(self, directory: Path) -> None:
        """Connect to the engine with this run directory.

        Raises:
            OSError: The engine sent no greeting.
            msgspec.DecodeError: The greeting is invalid.
        """
        self._directory = directory
        self._connection, self.listener, self.log_fd, self.engine = _connect(directory)

    @property
    def fd(self) -> int:
        """A descriptor that is readable once the supervisor of the engine has exited."""
        return self._connection.fileno()

    def is_running(self) -> bool:
        """Return whether the engine runs. If its supervisor has exited, another one may take its place."""
        return is_in_use(self._directory)

    def reserve(self) -> None:
        """Let no other process be a successor of this engine, until this process exits.

        Raises:
            HandoverFailed: Another process is one already.
        """
        # Children do not inherit this kind of lock, so none of them keeps it.
        file = os.open(
            self._directory / SUCCESSOR_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.pread(file, MAX_PID_BYTES, 0).decode()
            os.close(file)
            raise HandoverFailed(
                f"another engine upgrade (process {other or 'unknown'}) is about to replace the server at "
                f"{self.engine.url}; wait until it is ready, or stop it"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)

    def take(self) -> bool:
        """Ask the engine to stop accepting connections, and to exit when its requests have ended.

        Return False if no supervisor receives that.
        """
        try:
            self._connection.sendall(TAKE)
        except OSError:
            try:
                connection, listener, log_fd, _ = _connect(self._directory)
            except (OSError, msgspec.DecodeError):
                return False
            _close(listener, log_fd)
            self._connection.close()
            self._connection = connection
            return self.take()
        return True

    def close(self) -> None:
        """Close this process's descriptors. Before `take`, the engine continues to serve."""
        self._connection.close()
        _close(self.listener, self.log_fd)


def _close(listener: socket.socket, log_fd: int | None) -> None:
    listener.close()
    if log_fd is not None:
        os.close(log_fd)


def _connect(
    directory: Path,
) -> tuple[socket.socket, socket.socket, int | None, ServedEngine]:
    """Return a connection to an engine, its listening socket, its standard error if it sends that, and its greeting."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(GREETING_S)
        connection.connect(str(directory / SOCKET_NAME))
        greeting, descriptors, _, _ = socket.recv_fds(connection, MAX_GREETING_BYTES, 2)
        if not descriptors:
            raise OSError("the engine sent no listening socket")
        listener = socket.socket(fileno=descriptors[0])
        log_fd = descriptors[1] if len(descriptors) > 1 else None
        while not greeting.endswith(b"\n"):
            piece = connection.recv(MAX_GREETING_BYTES)
            if not piece:
                raise OSError("the engine closed the connection")
            greeting += piece
        engine = msgspec.json.decode(greeting, type=ServedEngine)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, listener, log_fd, engine


def find_predecessor(*, pid: int | None = None, url_end: str | None = None) -> Predecessor:
    """Return this user's running engine with process ID `pid` and with a URL that ends with `url_end`.

    No other process can be its successor from now on, until this process exits.

    Raises:
        HandoverFailed: There is no such engine, or more than one, or another process is about to replace it.
    """
    found: list[Predecessor] = []
    for each in _running_engines():
        engine = each.engine
        if pid in (None, engine.pid) and engine.url.endswith(url_end or ""):
            found.append(each)
        else:
            each.close()
    if len(found) == 1:
        found[0].reserve()
        return found[0]
    shown = ", ".join(f"{each.engine.url} (--pid {each.engine.pid})" for each in found)
    for each in found:
        each.close()
    if found:
        raise HandoverFailed(
            f"{len(found)} engines can be upgraded: {shown}; choose one with --pid"
        )
    wanted = f" with process ID {pid}" if pid is not None else f" at {url_end}" if url_end else ""
    raise HandoverFailed(
        f"no running engine{wanted} can be upgraded: it must be ready, on one machine, and run as the same "
        "user with the same XDG_RUNTIME_DIR or TMPDIR; start one with engine serve"
    )


def _running_engines() -> Iterator[Predecessor]:
    for directory in run_directories():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            yield Predecessor(directory)
