"""An HTTP connection with limits on the size of requests' heads and on the time that clients may take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn, cast

import httptools
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .access import OPEN_PATHS
from .continued_response import Continuation, ResponseRecord
from .descriptors import DescriptorReserve
from .errors import APIError, unavailable
from .late_timers import is_late
from .websocket import GOING_AWAY, MIN_BYTES_PER_S, OFFER, RESTART, Lease, WebSocket

MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of a request's head, and also of its trailers and chunk extensions."""

PIECE_BYTES: Final = 16 * 1024
"""Received data is parsed in pieces of this many bytes, so that at most one piece beyond `MAX_HEAD_BYTES` is parsed."""

ARRIVING_S: Final = 2.0
"""Seconds after its last byte during which an incomplete request counts as arriving."""

IDLE_S: Final = 0.5
"""Seconds without data after which a connection without a request may be closed, if descriptors are scarce."""

PROBE_S: Final = 1.0
"""Maximum seconds to send or read on a connection that is reserved for probes."""

_REASONS: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}


_TOO_LONG: Final = f"the {{part}} of a request must have at most {MAX_HEAD_BYTES} bytes"


class _RequestRefused(Exception):
    """Raised in a parser callback to reject a request with an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits on the size of heads and trailers, and on time.

    A client that neither completes its request nor reads its response for `slow_client_s` seconds is disconnected. Its
    requests are aborted, as after every disconnect.

    Streamed responses write to the connection directly, because a coroutine for each chunk would be slow. They find it
    in the request's state. `is_paused` is true while the client does not read. `on_writable` is called when the client
    reads again or the connection ends. `sent` records what a streamed response sends, if that is to be recorded.
    `on_made` is called before anything is read, and `on_lost` when the connection has ended.

    A request that asks for a WebSocket is answered as any other request, until its endpoint opens the WebSocket. Then
    all further data belongs to it. Other upgrades are ignored.
    """

    # Every token reads these attributes. Slots are faster than the dict that holds uvicorn's many other attributes.
    __slots__ = ("has_chunks", "is_paused", "on_writable", "sent", "transport")

    def __init__(
        self, slow_client_s: float, reserve: DescriptorReserve, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reserve = reserve
        self._refusal: _RequestRefused | None = None
        self.is_paused = False
        self.has_chunks = True
        self.on_writable: Callable[[], None] | None = None
        self.sent: ResponseRecord | None = None
        self.on_made: Callable[[Connection], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self._added_state: dict[str, Any] = {}
        self._slow_client_s = slow_client_s
        self._began = self._window_began = self._received_at = 0.0
        self._num_received = 0
        self._num_since_body = 0
        self._num_head_bytes = 0
        self._in_head = False
        self._in_request = False
        self._offers_upgrade = self._offers_websocket = False
        self._socket: WebSocket | None = None
        self._ends_after_response = False
        self._cycles: deque[RequestResponseCycle] = deque()
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and start the timer for its first request."""
        super().connection_made(transport)
        if self._reserve.add_connection(self, transport.get_extra_info("socket").fileno()):
            self._slow_client_s = min(self._slow_client_s, PROBE_S)
            self.app = self._answer_probes_only
        self._expect_request()
        if self.on_made is not None:
            self.on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every unfinished response of the disconnect."""
        self._reserve.remove_connection(self)
        if self.on_lost is not None:
            self.on_lost()
        self._stop_waiting()
        super().connection_lost(exc)
        # uvicorn notifies only the newest request, but responses to earlier ones may be unfinished, too.
        for cycle in self._unfinished_cycles():
            cycle.disconnected = True
            cycle.message_event.set()
        if self._socket is not None:
            self._socket.lose_connection()
        self._go_on_writing()

    def data_received(self, data: bytes) -> None:
        """Parse received data, within the limit for heads and trailers."""
        if self._socket is not None:
            self._socket.receive_data(data)
            return
        # on_message_begin resets this count, because data with the first byte of a request may start in the previous
        # request.
        self._num_received += len(data)
        self._received_at = self.loop.time()
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                self._num_since_body += len(piece)
                while piece:
                    piece = self._parse(piece)
                if self._is_head_too_long():
                    break
        except httptools.HttpParserError as error:
            if self._refusal is not None:
                self._refuse(self._refusal.status, str(self._refusal))
            else:
                self._refuse(400, f"the request is not valid HTTP/1.1: {error}")
            return
        if self._is_head_too_long():
            part = "head" if self._in_head else "trailers and chunk extensions"
            self._refuse(431, _TOO_LONG.format(part=part))

    def on_message_begin(self) -> None:
        """Start the timer of a new request."""
        # The timer starts here and not in data_received, because a client may send nothing but empty lines.
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope["state"].update(self._added_state, connection=self)
        self._added_state = {}
        self._in_head = self._in_request = True
        self._num_head_bytes = 0
        self._expect_request()

    def _parse(self, data: bytes) -> bytes:
        """Parse `data` and return the rest that must be parsed again.

        The parser stops after a head with an `Upgrade` header, as if another protocol followed. But the server may
        ignore the header, and another protocol follows only after the response. So that head is parsed again without
        the header.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade:
                [num_parsed] = upgrade.args
                return self._head_without_upgrade() + data[num_parsed:]
        return b""

    def _is_head_too_long(self) -> bool:
        return self._in_request and self._num_since_body > MAX_HEAD_BYTES

    def _head_without_upgrade(self) -> bytes:
        request = b"%b %b HTTP/%b" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((request, *fields, b"\r\n"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Trailers are ignored, because they arrive after the request was checked."""
        if self._in_head:
            self._count_head_bytes(len(name) + len(value) + len(": \r\n"))
            super().on_header(name, value)

    def on_url(self, url: bytes) -> None:
        """Store a part of the URL."""
        self._count_head_bytes(len(url))
        super().on_url(url)

    def _count_head_bytes(self, num_bytes: int) -> None:
        """Count bytes of the head; raise _RequestRefused beyond the limit.

        `_num_since_body` does not count heads that arrive together with other data.
        """
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(431, _TOO_LONG.format(part="head"))

    def _refuse_head(self, status: int, message: str) -> NoReturn:
        self._refusal = _RequestRefused(status, message)
        raise self._refusal

    def _check_framing(self) -> None:
        """Raise _RequestRefused if a proxy before the server could see another end or host of the request."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            self._refuse_head(
                501, "Transfer-Encoding must be chunked only; no other coding is supported"
            )
        if codings and self.parser.get_http_version() == "1.0":
            self._refuse_head(
                400, "HTTP/1.0 does not support Transfer-Encoding; send Content-Length"
            )
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1:
            self._refuse_head(400, "the request has more than one Host header; send one")
        if not num_hosts and self.parser.get_http_version() == "1.1":
            self._refuse_head(400, "the request has no Host header, which HTTP/1.1 requires")

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self._num_since_body = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Check the head and start the request's response."""
        self._check_framing()
        self._offers_upgrade = (
            self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        )
        if self._offers_upgrade:
            self._offers_websocket = self._asks_for_websocket()
            return
        self.scope["state"][OFFER] = self._offers_websocket
        self._offers_websocket = False
        super().on_headers_complete()
        self._in_head = False
        self._unfinished_cycles().append(self.cycle)
        if self._ends_after_response:
            self.cycle.keep_alive = False
        if len(self.pipeline) == 1:
            # uvicorn stops reading when a request arrives before the previous response has ended. Read one request
            # ahead, because a disconnect is noticed only while reading.
            self.flow.resume_reading()

    def _asks_for_websocket(self) -> bool:
        values = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        is_valid = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        return is_valid and values == [b"websocket"]

    def on_message_complete(self) -> None:
        """Stop the timer of the request."""
        if self._offers_upgrade:
            return
        self._in_request = False
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it is idle: no request is arriving and no response is unfinished."""
        timer = self.timeout_keep_alive_task
        if self._in_request or self._unfinished_cycles() or (timer is not None and is_late(timer)):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _unfinished_cycles(self) -> deque[RequestResponseCycle]:
        """Return the responses that are not complete. They are completed in the order of their requests."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles

    def pause_writing(self) -> None:
        """Pause streams and start the timer for a client that does not read."""
        super().pause_writing()
        self.is_paused = True
        if self._socket is not None:
            self._socket.pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        self._stall_timer = self.loop.call_later(self._slow_client_s, self._check_reading)

    def _check_reading(self) -> None:
        if self._stall_timer is not None and is_late(self._stall_timer):
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Resume streams after the client has read."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()
        if self._socket is not None:
            self._socket.resume_writing()
        self._go_on_writing()

    def begin_stream(self) -> None:
        """Prepare to stream a response without a Content-Length."""
        cycle = self._unfinished_cycles()[0]
        self.has_chunks = cycle.scope["http_version"] != "1.0"
        if not self.has_chunks:
            cycle.chunked_encoding = False

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of a streamed response. This does nothing after a disconnect."""
        if not self.transport.is_closing():
            if self.has_chunks:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if self.sent is not None:
                self.sent.add(data)
            self.transport.write(data)

    def answer_again(self, request: bytes, state: dict[str, Any], unsent: bytes | None) -> None:
        """Continue a response that another process has not finished, then close the connection.

        Args:
            request: The request, as the client could send it to continue the response.
            state: What is added to the state of the request.
            unsent: If the head of the response was sent, the bytes that must precede the rest; otherwise None.
        """
        self._added_state = state
        self.data_received(request)
        self.end_after_response()
        if unsent is not None and self.cycle is not None:
            self.cycle.transport = cast(asyncio.Transport, Continuation(self, unsent))

    def _go_on_writing(self) -> None:
        self.is_paused = False
        if self.on_writable is not None:
            self.on_writable()

    @property
    def is_answering(self) -> bool:
        """True if an accepted request is arriving, is not answered, or has an answer that is not sent completely."""
        if self.transport.get_write_buffer_size():
            return True
        if self._socket is not None:
            return self._socket.is_answering
        is_arriving = self._in_request and self.loop.time() - self._received_at < ARRIVING_S
        if is_arriving and self._in_head:
            return True
        # Rejections do not count, so that a shutdown ends although clients go on to send requests.
        return any(
            (is_arriving or not cycle.more_body) and cycle.scope["state"].get("is_accepted", True)
            for cycle in self._unfinished_cycles()
        )

    def _expect_request(self) -> None:
        self._began = self.loop.time()
        self._num_since_body = 0
        self._begin_window()
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._slow_client_s, self._check_pace)

    def _begin_window(self) -> None:
        """Start to measure the request's pace again, independent of its earlier pace."""
        self._window_began = self.loop.time()
        self._num_received = 0

    def _check_pace(self) -> None:
        # A request is not slow while reading is paused or an earlier request is being answered.
        has_excuse = self.flow.read_paused or bool(self.pipeline)
        has_excuse |= self._request_timer is not None and is_late(self._request_timer)
        remaining = self._window_began + self._slow_client_s - self.loop.time()
        is_slow = self._num_received < MIN_BYTES_PER_S * self._slow_client_s
        if remaining <= 0 and is_slow and not has_excuse:
            self._request_timer = None
            taken_s = self.loop.time() - self._began
            self._refuse(
                408,
                f"the request was not complete after {taken_s:.0f} s, and {self._num_received} bytes of it "
                f"arrived in the last {self._slow_client_s:g} s; send at least {MIN_BYTES_PER_S} bytes per "
                "second",
            )
            return
        if remaining <= 0 or has_excuse:
            self._begin_window()
            remaining = self._slow_client_s
        self._request_timer = self.loop.call_later(remaining, self._check_pace)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close the connection, unless another response has begun or must be sent first.

        An idle connection is closed without a 408.
        """
        self._stop_waiting()
        unfinished = self._unfinished_cycles()
        has_cycle = self._in_request and not self._in_head
        is_next = len(unfinished) == has_cycle
        is_idle = status == 408 and not self._in_request
        if is_next and not is_idle and not any(cycle.response_started for cycle in unfinished):
            body = msgspec.json.encode(APIError(status, message).body)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b"
                % (status, _REASONS[status].encode(), len(body), body)
            )
        self.transport.close()

    async def open_websocket(
        self,
        headers: list[tuple[bytes, bytes]],
        send: Send,
        max_bytes: int,
        new_lease: Callable[[], Lease],
    ) -> WebSocket:
        """Accept the handshake in the current request with these response headers, and return the WebSocket.

        Raises:
            APIError: The client has sent more than the handshake (400), or the connection is about to end (503).
        """
        cycle = self.cycle
        if self._in_request or len(self._unfinished_cycles()) != 1:
            raise APIError(400, "a handshake must not be followed by data before its answer")
        if self._ends_after_response:
            raise unavailable("This connection is about to end; connect again", PROBE_S)
        # The response has no body, and the connection stays open.
        cycle.chunked_encoding, cycle.keep_alive = False, True
        await send({"type": "http.response.start", "status": 101, "headers": headers})
        cycle.response_complete = True
        self._socket = WebSocket(self.transport, self._slow_client_s, max_bytes, new_lease)
        if cycle.disconnected:
            self._socket.lose_connection()
        return self._socket

    def end_websocket(self) -> None:
        """Close the WebSocket, if this is one, after its current answer."""
        if self._socket is not None:
            self._socket.end(GOING_AWAY, "the server is shutting down")

    def shutdown(self) -> None:
        """Close the connection after its current response, or the current answer of its WebSocket."""
        if self._socket is None:
            super().shutdown()
        else:
            self._socket.shut_down(GOING_AWAY, "the server is shutting down")

    def end_after_response(self) -> None:
        """Close the connection after its current response, or when it has been idle for the usual time.

        An idle connection is not closed immediately, because a request may be on its way.
        """
        if self._socket is not None:
            self._socket.end(RESTART, "the server is being upgraded: connect again")
            return
        self._ends_after_response = True
        if unfinished := self._unfinished_cycles():
            unfinished[-1].keep_alive = False

    @property
    def is_idle(self) -> bool:
        """True if no head of a request is complete, no answer is unfinished, and nothing has just arrived."""
        is_quiet = self.loop.time() - max(self._began, self._received_at) > IDLE_S
        is_busy = self._socket is not None or self.transport.get_write_buffer_size()
        return is_quiet and not is_busy and not self._unfinished_cycles()

    def close_now(self) -> None:
        """Close the connection without finishing its responses."""
        for cycle in self._unfinished_cycles():
            cycle.disconnected = True
        self.transport.abort()

    async def _answer_probes_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request if it is a probe (others get a 503), then close the connection to free its descriptor."""
        cycle = self._unfinished_cycles()[0]
        cycle.keep_alive = False
        if scope["path"].rstrip("/").endswith(tuple(OPEN_PATHS)):
            await self.config.loaded_app(scope, receive, send)
        else:
            error = unavailable("This server has too many connections; retry later", PROBE_S)
            await error.response()(scope, receive, send)

    def _stop_waiting(self) -> None:
        for timer in (self._request_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._request_timer = self._stall_timer = None
