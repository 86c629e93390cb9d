"""Copies of clients' connections, which the store process holds while recorded requests are answered on them.

A connection ends when the last process that has it open closes it. So the connections of a frontend that has crashed
stay open, and the frontend that is started in its place takes them and continues their answers.

Frontends connect to a Unix socket. The first message says whether a frontend will give copies (`Hello`) or take those
of its predecessor (`Take`). A copy that it gives is closed when it sends `Drop`. When a frontend's connection to this
socket ends, its copies wait for its successor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from ...protocol.transport import UNREADABLE

MAX_MESSAGE_BYTES: Final = 160 * 1024
"""Maximum bytes of a message. The head of a request has at most 64 KiB."""

MAX_MESSAGES: Final = 64
"""Maximum number of messages of one frontend that are read before the store does other work."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The first message of a frontend, with a descriptor of the memory in which it records what it sends."""

    client_index: int


class Keep(msgspec.Struct, tag="keep", array_like=True, frozen=True):
    """A copy of a connection, with its descriptor.

    Attributes:
        number: The number by which the frontend drops it.
        answer_id: The ID of the recorded request whose answer is sent.
        head: The head of the client's request, without the empty line at its end.
        slot: The place in the frontend's memory where the bytes that it sends are recorded.
        num_takes: How many frontends have taken the connection from one that crashed.
    """

    number: int
    answer_id: str
    head: bytes
    slot: int
    num_takes: int = 0


class Drop(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """The answer on a connection has ended, so that its copy is closed."""

    number: int


class Take(msgspec.Struct, tag="take", array_like=True, frozen=True):
    """Ask for one copy of earlier processes of a frontend.

    The reply is `Keep`, with the descriptors of the connection and of the memory, or `Nothing`.
    """

    client_index: int


class Nothing(msgspec.Struct, tag="nothing", array_like=True, frozen=True):
    """There is no further copy."""


Message: TypeAlias = Hello | Keep | Drop | Take | Nothing

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Message).decode


class _Frontend:
    """A frontend that has connected, and the copies of its connections."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.client_index = -1
        self.memory = -1
        self.kept: dict[int, tuple[Keep, int]] = {}

    def close(self) -> None:
        self.connection.close()
        for _, copy in self.kept.values():
            os.close(copy)
        self.kept.clear()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1


class HeldConnections:
    """Holds copies of the connections of all frontends of an engine.

    Attributes:
        fd: A descriptor that is readable when `turn` has something to do.
    """

    def __init__(self, path: str) -> None:
        # A store that crashed has left its socket.
        Path(path).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(path)
        self._socket.listen()
        self._socket.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._frontends: dict[int, _Frontend] = {}
        self._left: list[_Frontend] = []
        self.fd = self._epoll.fileno()

    def turn(self) -> None:
        """Read the messages that have arrived, and reply to them."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._accept()
            elif not self._read(self._frontends[fd]):
                self._lose(self._frontends.pop(fd))

    def close(self) -> None:
        """Close the socket and all copies."""
        for frontend in [*self._frontends.values(), *self._left]:
            frontend.close()
        self._socket.close()
        self._epoll.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._frontends[connection.fileno()] = _Frontend(connection)
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, frontend: _Frontend) -> bool:
        """Apply the messages of a frontend. Return False if it has closed its connection, or sends something else."""
        for _ in range(MAX_MESSAGES):
            try:
                data, fds, _, _ = socket.recv_fds(
                    frontend.connection, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            try:
                self._apply(frontend, decode(data), fds)
            except (OSError, *UNREADABLE):
                return False
            finally:
                for fd in fds:
                    os.close(fd)
        return True

    def _apply(self, frontend: _Frontend, message: Message, fds: list[int]) -> None:
        """Apply a message. Descriptors that remain in `fds` are closed by the caller."""
        match message:
            case Hello() if fds and frontend.memory < 0:
                frontend.client_index, frontend.memory = message.client_index, fds.pop()
            # Without free descriptors, the system delivers the message alone.
            case Keep() if fds and message.number not in frontend.kept:
                frontend.kept[message.number] = (message, fds.pop())
            case Drop() if message.number in frontend.kept:
                os.close(frontend.kept.pop(message.number)[1])
            case Take():
                self._give(frontend.connection, message.client_index)

    def _give(self, connection: socket.socket, client_index: int) -> None:
        """Send a copy of an earlier process of a frontend to its successor."""
        for predecessor in [each for each in self._left if each.client_index == client_index]:
            if predecessor.kept:
                message, copy = predecessor.kept.popitem()[1]
                try:
                    socket.send_fds(connection, [encode(message)], [copy, predecessor.memory])
                finally:
                    os.close(copy)
                return
            predecessor.close()
            self._left.remove(predecessor)
        connection.send(encode(Nothing()))

    def _lose(self, frontend: _Frontend) -> None:
        """Keep the copies of a frontend that has exited for its successor."""
        self._epoll.unregister(frontend.connection.fileno())
        if frontend.kept and frontend.memory >= 0:
            frontend.connection.close()
            self._left.append(frontend)
        else:
            frontend.close()
