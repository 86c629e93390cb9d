"""WebSockets (RFC 6455): the handshake, which is an HTTP request, and the messages after it.

The library `websockets` parses and writes the frames. It is imported for the first WebSocket, because most servers have
none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from starlette.types import Scope, Send

from .errors import APIError
from .late_timers import is_late

OFFER: Final = "offers_websocket"
"""The entry of a request's state that is true if the client asks for a WebSocket."""

KEY_SUBPROTOCOL: Final = "openai-insecure-api-key."
"""Prefix of the subprotocol that contains an API key, because web pages cannot set the headers of a WebSocket."""

PING_S: Final = 20.0
"""Seconds without data from the client before it is asked whether it is still there."""

MIN_BYTES_PER_S: Final = 1000
"""A message may take longer than the time limit of slow clients if it arrives at least this fast."""

PIECE_BYTES: Final = 4 * 1024
"""Bytes that are parsed before other callbacks run, because they may have hundreds of tiny frames."""

MAX_UNREAD: Final = 2
"""Number of complete messages that wait for the session before the client is no longer read."""

MAX_REASON_BYTES: Final = 123
"""Maximum bytes of the reason in a frame that closes a WebSocket."""

GOING_AWAY: Final = 1001
UNSUPPORTED_DATA: Final = 1003
INVALID_TEXT: Final = 1007
TOO_SLOW: Final = 1008
INTERNAL_ERROR: Final = 1011
RESTART: Final = 1012
TRY_LATER: Final = 1013

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_VERSION: Final = b"13"

_library_logger = logging.getLogger("websockets.server")
# It logs every end of a connection.
_library_logger.setLevel(logging.WARNING)


class WebSocketClosed(Exception):
    """The WebSocket is closed: no more messages can be received."""


class Lease(Protocol):
    """The memory of a message. Enter it as a context until the message is no longer needed."""

    def count_bytes(self, num_bytes: int) -> None:
        """Count a part of the message. Raises APIError 503 if there is not enough memory."""

    def mark_complete(self) -> None:
        """Record that the message has arrived completely."""

    def __enter__(self) -> Any:
        """Begin to use the memory."""

    def __exit__(self, *_: object) -> None:
        """Release the memory."""


class Message(NamedTuple):
    """A text message in UTF-8, and the lease on its memory."""

    text: bytes
    lease: Lease


class WebSocket:
    """An open WebSocket of a client.

    Clients may send text messages only, of at most `max_bytes`. A client that neither answers a ping nor completes a
    message nor reads is disconnected. While it does not read, or sends messages faster than they are received here, it
    is not read either. So an open WebSocket holds at most two messages, the one that arrives, and what the system
    buffers. Enter it as a context while it is served.

    Messages are not compressed: each WebSocket would need much memory for it.

    Args:
        transport: The client's connection.
        slow_client_s: Seconds that the client may take to answer or to complete a message.
        max_bytes: Maximum size of a message.
        new_lease: Returns the lease on the memory of a new message.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        slow_client_s: float,
        max_bytes: int,
        new_lease: Callable[[], Lease],
    ) -> None:
        # A late import, because most servers have no WebSockets.
        from websockets import frames, protocol

        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._slow_client_s = slow_client_s
        self._protocol = protocol.Protocol(
            protocol.SERVER, max_size=max_bytes, logger=_library_logger
        )
        self._kinds = frames.Opcode
        self._open = protocol.OPEN
        self._new_lease = new_lease
        self._lease = new_lease()
        self._unparsed = bytearray()
        self._message = bytearray()
        self._messages: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_reading = True
        self._num_turns = 0
        self._ending: tuple[int, str] | None = None
        self._is_last = False
        self.closed = asyncio.Event()
        """Set when the WebSocket is closed or closing."""
        self.is_paused = False
        """True while the client does not read."""
        self.on_writable: Callable[[], None] | None = None
        """Called when the client reads again, or when the connection ends."""
        self._heard_at = self._loop.time()
        self._num_received = 0
        self._was_arriving = False
        self._timer = self._loop.call_later(self._interval_s, self._check)
        self._closing_timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Serve the WebSocket in this context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the WebSocket if its session has failed."""
        if error is None:
            self.close()
        else:
            self.close(INTERNAL_ERROR, "internal server error")

    @property
    def is_open(self) -> bool:
        """True if messages can be sent and received."""
        return self._protocol.state is self._open

    @property
    def is_answering(self) -> bool:
        """True if an answer is being given."""
        return self._num_turns > 0

    async def receive(self) -> Message:
        """Return the next message. Raise WebSocketClosed if the WebSocket is closed."""
        while not self._messages:
            if not self.is_open:
                raise WebSocketClosed
            self._waiter = self._loop.create_future()
            await self._waiter
        message = self._messages.popleft()
        self._choose_reading()
        return message

    def send(self, text: bytes) -> None:
        """Send a text message. This does nothing after the WebSocket was closed."""
        if self.is_open:
            self._protocol.send_text(text)
            self._flush()

    async def wait_until_writable(self) -> None:
        """Wait while the client does not read. Raise WebSocketClosed if the WebSocket is closed."""
        if self.is_paused:
            writable = asyncio.Event()
            self.on_writable = writable.set
            try:
                await writable.wait()
            finally:
                self.on_writable = None
        if not self.is_open:
            raise WebSocketClosed

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the WebSocket after sending everything that was written before."""
        if self.is_open:
            text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            self._protocol.send_close(code, text)
            self._flush()
            if self._is_last:
                self._transport.close()
            else:
                self._closing_timer = self._loop.call_later(
                    self._slow_client_s, self._transport.abort
                )
            self._stop()

    def end(self, code: int, reason: str) -> None:
        """Close the WebSocket when the running turns, if any, have ended."""
        self._ending = (code, reason)
        if not self._num_turns:
            self.close(code, reason)

    def shut_down(self, code: int, reason: str) -> None:
        """Do as `end`, without waiting until the client confirms that the WebSocket is closed."""
        self._is_last = True
        if self.is_open:
            self.end(code, reason)
        else:
            self._transport.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Mark that an answer is being given, during which `end` does not close the WebSocket."""
        self._num_turns += 1
        try:
            yield
        finally:
            self._num_turns -= 1
            if self._ending is not None and not self._num_turns:
                self.close(*self._ending)

    def receive_data(self, data: bytes) -> None:
        """Receive data from the client."""
        self._heard_at = self._loop.time()
        self._num_received += len(data)
        is_scheduled = bool(self._unparsed)
        self._unparsed += data
        if not is_scheduled:
            self._parse()

    def lose_connection(self) -> None:
        """Close the WebSocket without a message, because the connection has ended."""
        self._protocol.receive_eof()
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._stop()
        self._unparsed.clear()

    def pause_writing(self) -> None:
        """Record that the client does not read. It gets no answers to pings meanwhile, so it is not read either."""
        self.is_paused = True
        self._choose_reading()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        self.is_paused = False
        self._choose_reading()
        self._go_on_writing()

    def _parse(self) -> None:
        """Parse the next piece of the received data."""
        piece = bytes(self._unparsed[:PIECE_BYTES])
        if not piece:
            return
        del self._unparsed[: len(piece)]
        try:
            self._lease.count_bytes(len(piece))
        except APIError as error:
            if not self.is_open:
                # It is closing already, but the client goes on to send.
                self._transport.abort()
                return
            self.close(TRY_LATER, error.message)
        self._protocol.receive_data(piece)
        for frame in self._protocol.events_received():
            self._receive_frame(frame)
        self._flush()
        if not self.is_open:
            self._stop()
        if self._unparsed:
            self._loop.call_soon(self._parse)
        self._choose_reading()

    def _receive_frame(self, frame: Any) -> None:
        kinds = self._kinds
        if not self.is_open or frame.opcode not in (kinds.TEXT, kinds.BINARY, kinds.CONT):
            # The library has answered frames of other kinds.
            return
        if frame.opcode is kinds.BINARY:
            self.close(UNSUPPORTED_DATA, "messages must be text, got a binary message")
            return
        self._message += frame.data
        if not frame.fin:
            return
        text, self._message = bytes(self._message), bytearray()
        try:
            text.decode()
        except UnicodeDecodeError as error:
            self.close(INVALID_TEXT, f"the message is not UTF-8 at byte {error.start}")
            return
        self._lease.mark_complete()
        self._messages.append(Message(text, self._lease))
        self._lease = self._new_lease()
        self._wake()

    def _choose_reading(self) -> None:
        """Read the client unless it is too far ahead, or does not read itself."""
        is_ahead = len(self._messages) >= MAX_UNREAD or bool(self._unparsed) or self.is_paused
        if self._is_reading == is_ahead and not self._transport.is_closing():
            self._is_reading = not is_ahead
            if is_ahead:
                self._transport.pause_reading()
            else:
                self._heard_at = self._loop.time()
                self._transport.resume_reading()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop(self) -> None:
        """Release what an open WebSocket needs. Messages that were not received are lost."""
        self._timer.cancel()
        for message in self._messages:
            with message.lease:
                pass
        self._messages.clear()
        with self._lease:
            self._message.clear()
        self._lease = self._new_lease()
        self.closed.set()
        self._wake()
        self._go_on_writing()

    def _go_on_writing(self) -> None:
        if self.on_writable is not None:
            self.on_writable()

    @property
    def _interval_s(self) -> float:
        return min(PING_S, self._slow_client_s)

    def _check(self) -> None:
        """Ping a silent client, and close the WebSocket if the client does not answer or is too slow."""
        if is_late(self._timer):
            self._heard_at = self._loop.time()
            self._was_arriving = False
        self._timer = self._loop.call_later(self._interval_s, self._check)
        is_arriving = bool(self._protocol.reader.buffer or self._protocol.current_size is not None)
        is_slow = self._num_received < MIN_BYTES_PER_S * self._interval_s
        self._num_received = 0
        was_arriving, self._was_arriving = self._was_arriving, is_arriving and self._is_reading
        if not self._is_reading:
            return
        if was_arriving and is_arriving and is_slow:
            self.close(
                TOO_SLOW,
                f"a message must arrive with at least {MIN_BYTES_PER_S} bytes per second",
            )
            return
        silent_s = self._loop.time() - self._heard_at
        if silent_s > self._interval_s + self._slow_client_s:
            self.close(INTERNAL_ERROR, "the client did not answer a ping")
        elif silent_s >= self._interval_s:
            self._protocol.send_ping(b"")
            self._flush()


async def open_websocket(
    scope: Scope, send: Send, max_bytes: int, new_lease: Callable[[], Lease]
) -> WebSocket:
    """Accept the handshake of a request and return the WebSocket.

    Raises:
        APIError: The request is not a valid handshake (400, 426), or the connection cannot become a WebSocket (503).
    """
    state, headers = scope["state"], dict(scope["headers"])
    if not state.get(OFFER):
        raise _upgrade_required("this route is a WebSocket: connect to it with a WebSocket client")
    if headers.get(b"sec-websocket-version", b"").strip() != _VERSION:
        raise _upgrade_required("the header Sec-WebSocket-Version must be 13")
    key = headers.get(b"sec-websocket-key", b"").strip()
    if not _is_key(key):
        raise APIError(400, "the header Sec-WebSocket-Key must be 16 bytes in base64")
    accepted = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
    answer = [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-accept", accepted),
    ]
    # Browsers need one of the subprotocols that they offer.
    for name in read_subprotocols(headers):
        if not name.startswith(KEY_SUBPROTOCOL):
            answer.append((b"sec-websocket-protocol", name.encode("latin-1")))
            break
    socket: WebSocket = await state["connection"].open_websocket(answer, send, max_bytes, new_lease)
    return socket


def read_subprotocols(headers: dict[bytes, bytes]) -> list[str]:
    """Return the subprotocols that a handshake offers."""
    offered = headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    return [name.strip() for name in offered.split(",") if name.strip()]


def _upgrade_required(message: str) -> APIError:
    headers = {
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-version": _VERSION.decode(),
    }
    return APIError(426, message, headers=headers)


def _is_key(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False
