"""Keep the connections of clients through a crash of this frontend, while recorded requests are answered on them.

The store process holds a copy of each such connection (`store/held_connections.py`), and memory that it shares records
what was sent (`sent_bytes.py`). The frontend that is started in this one's place takes the connections and answers each
request as if its client had returned with `Last-Event-ID`, but sends only the bytes that are missing. So the client
notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from ....protocol.config import EngineConfig
from ....protocol.errors import counted
from ....protocol.transport import UNREADABLE
from ...http.connection import Connection
from ...http.continued_response import ResponseRecord
from ...http.routing import Asgi
from ...store.held_connections import MAX_MESSAGE_BYTES, Drop, Hello, Keep, Take, decode, encode
from .event_positions import POSITION, EventPosition, parse_event_id
from .sent_bytes import SentMemory, SentRecord, SentResponse, read_sent

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.5
"""Seconds between attempts to connect to the store."""

TAKE_S: Final = 5.0
"""Maximum seconds that the store takes to hand over a connection."""

TRIES: Final = 3
"""Number of times that a frontend asks the store for connections, if it does not answer."""

MAX_TAKES: Final = 8
"""Maximum number of frontends that take over one connection."""

_OTHERS: Final = {
    b"content-length",
    b"transfer-encoding",
    b"expect",
    b"idempotency-key",
    b"last-event-id",
}
"""Headers that describe the first request, and not the one by which its answer is continued."""

_HISTORY: Final = "kept_history"

Adopt = Callable[[socket.socket, Callable[[Connection], None]], Awaitable[None]]
"""Makes an open socket a connection of the HTTP server. The function is called before anything is read from it."""


class _History(NamedTuple):
    """The earlier part of a response that this frontend continues.

    `num_takes` frontends have taken it over, this one under `number`. After `unsent`, the client has all events up to
    `last_event_id`; "" if the response has not begun.
    """

    number: int
    num_takes: int = 0
    last_event_id: str = ""
    unsent: bytes = b""


class _Taken(NamedTuple):
    """A connection that was taken under `number`; without `client` if this process has no free descriptor."""

    number: int
    message: Keep
    client: socket.socket | None
    sent: SentResponse | None


class KeptConnections:
    """The connections of this frontend that the store process holds copies of.

    There are none on other systems than Linux, and if requests are not recorded.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        self._path = config.connections_path()
        self._client_index = client_index
        self._memory: SentMemory | None = None
        self._holder: socket.socket | None = None
        self._kept: dict[int, tuple[Keep, Connection]] = {}
        self._num_kept = 0
        self._timer: asyncio.TimerHandle | None = None
        if config.store.keeps_requests:
            # Only Linux has such memory, and counts the bytes of a connection.
            with contextlib.suppress(OSError, AttributeError):
                self._memory = SentMemory()

    def start(self) -> None:
        """Connect to the store process, now and whenever it has restarted."""
        if self._memory is None:
            return
        self._timer = None
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        holder.setblocking(False)
        try:
            holder.connect(self._path)
            socket.send_fds(
                holder, [encode(Hello(self._client_index, os.getpid()))], [self._memory.fd]
            )
        except OSError:
            holder.close()
            self._timer = asyncio.get_running_loop().call_later(RECONNECT_S, self.start)
            return
        self._holder = holder
        # The store sends nothing here, so the socket is readable when the store has exited.
        asyncio.get_running_loop().add_reader(holder.fileno(), self._reconnect)
        for message, connection in self._kept.values():
            self._send(message, connection)

    def close(self) -> None:
        """Close the connection to the store process."""
        self._disconnect()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @contextlib.contextmanager
    def keep(self, asgi: Asgi, answer_id: str) -> Iterator[None]:
        """Keep the connection of a request while its answer is sent on it, if this is possible.

        `answer_id` is the ID of the recorded answer; "" if it is not recorded.
        """
        memory, connection = self._memory, _find_plain(asgi)
        slot = None
        if memory is not None and connection is not None and answer_id:
            slot = memory.take_slot()
        if memory is None or connection is None or slot is None:
            yield
            return
        history: _History = asgi.state.get(_HISTORY, _History(0))
        number = self._next_number()
        try:
            with contextlib.suppress(OSError):
                connection.sent = SentRecord(
                    memory,
                    slot,
                    number,
                    connection.transport,
                    history.last_event_id,
                    history.unsent,
                )
                head = _head_of(asgi)
                message = Keep(
                    number, answer_id, head, slot, history.num_takes, replaces=history.number
                )
                self._kept[number] = message, connection
                self._send(message, connection)
            yield
        finally:
            connection.sent = None
            self._kept.pop(number, None)
            self._send(Drop(number))
            memory.free_slot(slot)

    async def take_over(self, adopt: Adopt) -> None:
        """Take the connections of the frontend that this one replaces, and continue their responses."""
        if self._memory is None:
            return
        for _ in range(TRIES):
            try:
                await self._take_all(adopt)
                return
            except (OSError, *UNREADABLE) as error:
                logger.warning("connections of the frontend before this one may be lost: %s", error)
                # The store closes the copies that this frontend has taken but does not send.
                self._reconnect()

    async def _take_all(self, adopt: Adopt) -> None:
        """Take connections until there are no more.

        Raises:
            OSError: The store does not answer.
        """
        num_continued = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
            holder.settimeout(TAKE_S)
            holder.connect(self._path)
            while taken := await asyncio.to_thread(self._take, holder, self._next_number()):
                num_continued += await self._continue(taken, adopt)
        if num_continued:
            continued = counted(num_continued, "response")
            logger.info("continuing %s of the frontend before this one", continued)

    def _next_number(self) -> int:
        self._num_kept += 1
        return self._num_kept

    def _take(self, holder: socket.socket, number: int) -> _Taken | None:
        """Return the next connection; None if there is none.

        Raises:
            OSError: The store does not answer.
        """
        holder.send(encode(Take(os.getpid(), number)))
        data, fds, _, _ = socket.recv_fds(holder, MAX_MESSAGE_BYTES, 2)
        message = decode(data)
        if not isinstance(message, Keep):
            return None
        client, sent = None, None
        # Without free descriptors, the system delivers the message alone or with one of them.
        if len(fds) == 2:
            client = socket.socket(fileno=fds.pop(0))
            client.setblocking(False)
            with contextlib.suppress(OSError):
                sent = read_sent(fds[0], message.slot, message.number, client)
        for fd in fds:
            os.close(fd)
        return _Taken(number, message, client, sent)

    async def _continue(self, taken: _Taken, adopt: Adopt) -> bool:
        """Continue the response on a connection, and then close it. Return False if that is not possible."""
        number, message, client, sent = taken
        if client is not None and sent is not None and message.num_takes < MAX_TAKES:
            try:
                await adopt(client, partial(self._answer_again, number, message, sent))
                return True
            except OSError:
                # The client has disconnected.
                pass
        if client is not None:
            client.close()
        self._send(Drop(number))
        return False

    def _answer_again(
        self, number: int, message: Keep, sent: SentResponse, connection: Connection
    ) -> None:
        connection.on_lost = lambda: self._send(Drop(number))
        if sent.has_ended:
            connection.transport.write(sent.unsent)
            connection.transport.close()
            return
        position = EventPosition(message.answer_id)
        if sent.last_event_id:
            position = parse_event_id(sent.last_event_id)
        num_takes = message.num_takes + 1
        # A body is ignored, because the request is recorded.
        body = b"{}" if message.head.startswith(b"POST") else b""
        connection.answer_again(
            b"%b\r\ncontent-length: %d\r\n\r\n%b" % (message.head, len(body), body),
            {
                POSITION: position,
                _HISTORY: _History(number, num_takes, sent.last_event_id, sent.unsent),
            },
            sent.unsent if sent.has_begun else None,
        )

    def _send(self, message: Keep | Drop, connection: Connection | None = None) -> None:
        """Send a message to the store process. If it is busy, a connection is not kept."""
        if self._holder is None:
            return
        try:
            if connection is None:
                self._holder.send(encode(message))
            elif not connection.transport.is_closing():
                copied = connection.transport.get_extra_info("socket").fileno()
                socket.send_fds(self._holder, [encode(message)], [copied])
        except OSError:
            if connection is None:
                # The store would hold the copy, so that the client would not notice the end of the connection.
                self._reconnect()

    def _reconnect(self) -> None:
        self._disconnect()
        self.start()

    def _disconnect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._holder is not None:
            asyncio.get_running_loop().remove_reader(self._holder.fileno())
            self._holder.close()
            self._holder = None


def find_record(asgi: Asgi) -> ResponseRecord | None:
    """Return the record of the response to a request; None if its connection is not kept."""
    connection = asgi.state.get("connection")
    return connection.sent if isinstance(connection, Connection) else None


def _find_plain(asgi: Asgi) -> Connection | None:
    """Return the connection of a request if another process can continue a response on it: on TCP, without TLS."""
    connection = asgi.state.get("connection")
    if not isinstance(connection, Connection) or connection.transport.is_closing():
        return None
    # The scheme in the scope may be that of a proxy, which ends TLS.
    find = connection.transport.get_extra_info
    is_tcp = find("socket").family in (socket.AF_INET, socket.AF_INET6)
    is_plain = is_tcp and find("sslcontext") is None
    return connection if is_plain and asgi.scope["http_version"] == "1.1" else None


def _head_of(asgi: Asgi) -> bytes:
    """Return the head of a request without the empty line at its end."""
    scope = asgi.scope
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % field for field in scope["headers"] if field[0] not in _OTHERS]
    return b"\r\n".join(lines)
