"""Copies of clients' connections, which the store process holds while recorded requests are answered on them.

A connection ends when the last process that has it open closes it. So the connections of a frontend that has crashed
stay open, and the frontend that is started in its place takes them and continues their answers.

A frontend connects to a Unix socket, says `Hello`, and sends copies of connections. A copy is closed when it sends
`Drop`. When its connection to this socket ends, its copies wait for its successor. That connects a second time to take
them (`Take`). It has a copy as its own from then on, so that the next successor finds it if this one crashes, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from ...protocol.transport import UNREADABLE
from ..http.descriptors import find_reserved

MAX_MESSAGE_BYTES: Final = 160 * 1024
"""Maximum bytes of a message. The head of a request has at most 64 KiB."""

LEFT_S: Final = 120.0
"""Seconds after which the copies of a frontend that has exited are closed if its successor has not taken them."""

MAX_MESSAGES: Final = 64
"""Maximum number of messages of one frontend that are read before the store does other work."""

MAX_READS: Final = 64
"""Maximum number of times that so many messages of a frontend that has exited are read."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The first message of a frontend process, with a descriptor of the memory in which it records what it sends.

    A process that connects again sends all its copies again.
    """

    client_index: int
    pid: int


class Keep(msgspec.Struct, tag="keep", array_like=True, frozen=True):
    """A copy of a connection, with its descriptor.

    Attributes:
        number: The number by which the frontend drops it.
        answer_id: The ID of the recorded request whose answer is sent.
        head: The head of the client's request, without the empty line at its end.
        slot: The place in the frontend's memory where the bytes that it sends are recorded.
        num_takes: How many frontends have taken the connection from one that crashed.
        replaces: The number of an earlier copy of the same connection, in whose place this one is held; 0 for none.
    """

    number: int
    answer_id: str
    head: bytes
    slot: int
    num_takes: int = 0
    replaces: int = 0


class Drop(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """The answer on a connection has ended, so that its copy is closed."""

    number: int


class Take(msgspec.Struct, tag="take", array_like=True, frozen=True):
    """Ask for one copy of the earlier processes of the frontend `pid`, which drops it by `number`.

    The reply is `Keep`, with the descriptors of the connection and of the memory, or `Nothing`.
    """

    pid: int
    number: int


class Nothing(msgspec.Struct, tag="nothing", array_like=True, frozen=True):
    """There is no further copy."""


Message: TypeAlias = Hello | Keep | Drop | Take | Nothing

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Message).decode


class _Memory:
    """The memory of one frontend process. It is closed when nobody uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._num_users = 1

    def share(self) -> _Memory:
        """Return this memory for one more user."""
        self._num_users += 1
        return self

    def release(self) -> None:
        """Let one user go."""
        self._num_users -= 1
        if not self._num_users:
            os.close(self.fd)


class _Copy(NamedTuple):
    """A copy of a connection, and the memory that has the record of its answer."""

    message: Keep
    connection: int
    memory: _Memory

    def close(self) -> None:
        os.close(self.connection)
        self.memory.release()


class _Frontend:
    """A frontend that has connected, and the copies of its connections."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.client_index = self.pid = -1
        self.memory: _Memory | None = None
        self.left_at = 0.0
        self.kept: dict[int, _Copy] = {}

    def drop(self, number: int) -> None:
        if (copy := self.kept.pop(number, None)) is not None:
            copy.close()

    def close(self) -> None:
        self.connection.close()
        for copy in self.kept.values():
            copy.close()
        self.kept.clear()
        if self.memory is not None:
            self.memory.release()
            self.memory = None


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
        # The last descriptors are for the store's own files. A new one gets the lowest free number, so its number shows
        # how many are in use.
        self._end_of_copies, _ = find_reserved()
        self.fd = self._epoll.fileno()

    def turn(self) -> None:
        """Read the messages that have arrived, and reply to them. Close copies that nobody takes."""
        if self._left:
            last = time.monotonic() - LEFT_S
            self._close_left(lambda left: left.left_at < last)
        for fd, _ in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._accept()
            elif (frontend := self._frontends.get(fd)) is not None and not self._read(frontend):
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
            case Hello() if fds and frontend.memory is None:
                frontend.memory = _Memory(fds.pop())
                self._replace(message)
                frontend.client_index, frontend.pid = message.client_index, message.pid
            case Keep() if frontend.memory is not None and message.number not in frontend.kept:
                connection = self._find_connection(frontend, message, fds)
                if connection is not None:
                    copy = _Copy(message, connection, frontend.memory.share())
                    frontend.kept[message.number] = copy
            case Drop():
                frontend.drop(message.number)
            case Take():
                self._give(frontend.connection, message)

    def _find_connection(self, frontend: _Frontend, message: Keep, fds: list[int]) -> int | None:
        """Return the connection of a message: that of the earlier copy, or the one in `fds`.

        Return None if no more descriptors may be used.
        """
        if (earlier := frontend.kept.pop(message.replaces, None)) is not None:
            earlier.memory.release()
            return earlier.connection
        # Without free descriptors, the system delivers the message alone.
        return fds.pop() if fds and fds[0] < self._end_of_copies else None

    def _replace(self, hello: Hello) -> None:
        """End the connections of earlier processes of a frontend, and close the copies that this one sends again."""
        for fd, earlier in list(self._frontends.items()):
            if earlier.client_index == hello.client_index:
                # Its last messages may not have been read yet.
                for _ in range(MAX_READS):
                    if not self._read(earlier):
                        break
                self._lose(self._frontends.pop(fd))
        self._close_left(lambda left: left.pid == hello.pid)

    def _give(self, connection: socket.socket, call: Take) -> None:
        """Send a copy of an earlier process of a frontend to its successor."""
        live = self._frontends.values()
        successor = next((each for each in live if each.pid == call.pid), None)
        if successor is not None:
            self._close_left(lambda left: not left.kept)
            for predecessor in self._left:
                if predecessor.client_index == successor.client_index:
                    copy = successor.kept[call.number] = predecessor.kept.popitem()[1]
                    fds = [copy.connection, copy.memory.fd]
                    socket.send_fds(connection, [encode(copy.message)], fds)
                    return
        connection.send(encode(Nothing()))

    def _lose(self, frontend: _Frontend) -> None:
        """Keep the copies of a frontend that has exited for its successor."""
        self._epoll.unregister(frontend.connection.fileno())
        if frontend.kept:
            frontend.connection.close()
            frontend.left_at = time.monotonic()
            self._left.append(frontend)
        else:
            frontend.close()

    def _close_left(self, is_over: Callable[[_Frontend], bool]) -> None:
        """Close the copies of the frontends that have exited for which `is_over` returns true."""
        for left in [each for each in self._left if is_over(each)]:
            left.close()
            self._left.remove(left)
