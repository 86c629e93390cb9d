"""Server-sent events, written to the connection with one write for all new output.

The callback that delivers tokens writes them, without a task. Writing pauses while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from starlette.types import Receive, Send

from ...client.engine_client import RequestGroup, Sequence
from ...client.request_group import STREAMED_AT_ONCE
from ...http.errors import APIError, internal_error
from ...http.json_pieces import encode_whole
from ..generation import ClientWatch

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 15.0
"""Seconds without an event before a comment is sent, so that proxies keep the connection open."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

_START: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def event(content: object) -> bytes:
    """Return a server-sent event with the content as JSON."""
    return b"data: %b\n\n" % encode_whole(content)


def _error_event(error: APIError) -> bytes:
    """Return an error as an event; it includes `retry_after` because headers have been sent already."""
    body = error.body
    if (seconds := error.headers.get("retry-after")) is not None:
        body["error"]["retry_after"] = int(seconds)
    return event(body)


class ChunkEncoder(Protocol):
    """Encodes the new output of sequences as events."""

    def encode(self, update: list[Sequence]) -> bytes:
        """Return the events; b"" if the output needs none.

        Raises:
            APIError: A sequence failed.
        """

    def closing(self) -> bytes:
        """Return the events between the last output and `[DONE]`."""


class ChunkWriter(Protocol):
    """The client's connection, without the ASGI layers, which only add headers.

    `is_paused` is true while the client reads too slowly. `on_writable` is called when it reads again or disconnects.
    """

    is_paused: bool
    on_writable: Callable[[], None] | None
    has_chunks: bool
    """False for HTTP/1.0, where a stream ends by closing the connection."""

    def begin_stream(self) -> None:
        """Prepare a response without a length; called before the response starts."""

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of the body of a response that has started; do nothing after a disconnect."""


class EventStream:
    """One streamed response. It starts with its first write, so an earlier failure still gets its HTTP status."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_ended",
        "_group",
        "_is_more_scheduled",
        "_keep_alive_s",
        "_send",
        "_started",
        "_was_silent",
    )

    def __init__(
        self, send: Send, connection: ChunkWriter, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self._send = send
        self._connection = connection
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._was_silent = False
        self._is_more_scheduled = False

    async def run(self, receive: Receive, group: RequestGroup, chunks: ChunkEncoder) -> None:
        """Write until every sequence has finished or the client is gone.

        While the client does not read, new output accumulates and later becomes one chunk.

        Raises:
            APIError: The request failed before anything was written.
        """
        self._group, self._chunks = group, chunks
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            with ClientWatch(receive, group) as watch:
                first = await self._read_first()
                self._started = True
                self._connection.begin_stream()
                await self._send(_START)
                await self._write_all(first)
                if watch.disconnected:
                    return
                end = chunks.closing()
        except APIError as error:
            if not self._started:
                raise
            end = _error_event(error)
        except Exception:
            if not self._started:
                raise
            logger.exception("a stream failed")
            end = event(internal_error("Internal server error").body)
        body = end + DONE
        if not self._connection.has_chunks:
            self._connection.write_chunk(body)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _read_first(self) -> bytes:
        """Return the first events, or a comment if none come in `keep_alive_s`."""
        body = b""
        try:
            async with asyncio.timeout(self._keep_alive_s):
                while not body and (update := await self._group.wait_for_updates()):
                    body = self._chunks.encode(update)
        except TimeoutError:
            return KEEP_ALIVE
        return body

    async def _write_all(self, first: bytes) -> None:
        group, connection = self._group, self._connection
        keep_alive = asyncio.create_task(self._keep_alive())
        group.on_update = connection.on_writable = self._write_updates
        try:
            if first:
                connection.write_chunk(first)
            self._write_updates()
            await self._ended
        finally:
            group.on_update = connection.on_writable = None
            keep_alive.cancel()

    def _write_updates(self) -> None:
        connection, group = self._connection, self._group
        if connection.is_paused:
            return
        try:
            body = self._chunks.encode(group.take_updates(STREAMED_AT_ONCE))
            if body:
                self._was_silent = False
                connection.write_chunk(body)
        except Exception as error:
            self._end(error)
            return
        if group.updates:
            self._write_more_soon()
        elif not group.num_unfinished:
            self._end(None)

    def _write_more_soon(self) -> None:
        """Write the rest after other callbacks have run."""
        if not self._is_more_scheduled:
            self._is_more_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_more)

    def _write_more(self) -> None:
        self._is_more_scheduled = False
        if not self._ended.done():
            self._write_updates()

    def _end(self, error: Exception | None) -> None:
        """Stop writing at once, though the task of `run` may resume later."""
        self._group.on_update = self._connection.on_writable = None
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _keep_alive(self) -> None:
        """Send comments during silence, because proxies close silent connections; clients ignore comments."""
        while True:
            self._was_silent = True
            await asyncio.sleep(self._keep_alive_s)
            if self._was_silent and not self._connection.is_paused:
                self._connection.write_chunk(KEEP_ALIVE)
