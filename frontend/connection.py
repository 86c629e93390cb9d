"""An HTTP connection that does not wait for ever for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .api.errors import APIError

MIN_BYTES_PER_S: Final = 1000
"""A request may take longer than the limit if it keeps coming at this pace, as large ones do on slow lines."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's head, and of everything else that is not its body: trailers and chunk extensions."""

_REASONS: Final = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on what a client may take: the size of a head and of trailers, and time.

    A client that neither completes its request nor reads its answer for `slow_client_s` loses the connection, and
    what runs for it is aborted as after any disconnect.

    A stream writes here without a coroutine for each chunk: it finds the connection in its request's state.
    `is_paused` while the client does not read; `on_writable` is called when it reads again or the connection ends.
    """

    # Every token looks at these, and an object with as many attributes as uvicorn's keeps the others in a hash table.
    __slots__ = ("has_chunks", "is_paused", "on_writable", "transport")

    def __init__(self, slow_client_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_paused = False
        self.has_chunks = True
        self.on_writable: Callable[[], None] | None = None
        self._slow_client_s = slow_client_s
        self._began = 0.0
        self._num_received = 0
        self._num_since_body = 0
        self._in_head = False
        self._in_request = False
        self._offers_upgrade = False
        self._cycles: list[RequestResponseCycle] = []
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        # uvicorn tells only the newest request, and earlier ones on this connection may still be answered.
        for cycle in self._due():
            cycle.disconnected = True
            cycle.message_event.set()
        self._go_on_writing()

    def data_received(self, data: bytes) -> None:
        # The bytes that arrive with a request's first are not counted: some may belong to the request before.
        self._num_received += len(data)
        self._num_since_body += len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_request and self._num_since_body > MAX_HEAD_BYTES:
            part = "head" if self._in_head else "trailers and chunk extensions"
            self._refuse(431, f"the {part} of a request must have at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        # Not for an empty line, which may be all that ever comes.
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._in_head = self._in_request = True
        self._expect_request()

    def _parse(self, data: bytes) -> bytes:
        """Parse `data`; returns what is to be parsed next.

        Only HTTP/1.1 is spoken here, and an `Upgrade` header may be ignored. But after one the parser stops, as if the
        request's body and all that follows were in the other protocol. So the head is parsed again without that header.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade:
                [num_parsed] = upgrade.args
                return self._head_without_upgrade() + data[num_parsed:]
        return b""

    def _head_without_upgrade(self) -> bytes:
        request = b"%b %b HTTP/%b" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((request, *fields, b"\r\n"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are ignored: they come too late to decide anything."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_since_body = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._offers_upgrade = (
            self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        )
        if self._offers_upgrade:
            return
        self._in_head = False
        super().on_headers_complete()
        self._cycles = [*self._due(), self.cycle]
        if len(self.pipeline) == 1:
            # uvicorn stops reading when a request arrives before the last one is answered. One is read ahead, since
            # a disconnect is noticed only while reading.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_request = False
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """A connection is idle when no request is arriving and no answer is due."""
        if self._in_request or self._due():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _due(self) -> list[RequestResponseCycle]:
        """The answers that are not complete."""
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_paused = True
        self._stall_timer = self.loop.call_later(self._slow_client_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()
        self._go_on_writing()

    def begin_stream(self) -> None:
        cycle = self._due()[0]
        self.has_chunks = cycle.scope["http_version"] != "1.0"
        if not self.has_chunks:
            cycle.chunked_encoding = False

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of a response that was started without a length; nothing once the connection is lost."""
        if not self.transport.is_closing():
            if self.has_chunks:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            self.transport.write(data)

    def _go_on_writing(self) -> None:
        self.is_paused = False
        if self.on_writable is not None:
            self.on_writable()

    def _expect_request(self) -> None:
        self._began = self.loop.time()
        self._num_received = self._num_since_body = 0
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._slow_client_s, self._check_pace)

    def _check_pace(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused or self.pipeline:
            # The rest of the request is late because reading was paused, or because an earlier one is answered first.
            self._began = now
        allowed = self._slow_client_s + self._num_received / MIN_BYTES_PER_S
        remaining = self._began + allowed - now
        if remaining > 0:
            self._request_timer = self.loop.call_later(remaining, self._check_pace)
        else:
            self._request_timer = None
            self._refuse(408, f"the request was not complete after {allowed:.0f} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if there is a request and no other answer has begun or is due before, and close."""
        self._stop_waiting()
        due = self._due()
        is_next = not due if self._in_head else due == [self.cycle]
        if self._in_request and is_next and not any(cycle.response_started for cycle in due):
            body = msgspec.json.encode(APIError(status, message).body)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b"
                % (status, _REASONS[status].encode(), len(body), body)
            )
        self.transport.close()

    def _stop_waiting(self) -> None:
        for timer in (self._request_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._request_timer = self._stall_timer = None


def connection_factory(slow_client_s: float) -> Callable[..., Connection]:
    """What uvicorn makes its connections with."""

    def make(*args: Any, **kwargs: Any) -> Connection:
        return Connection(slow_client_s, *args, **kwargs)

    return make
