"""Server-sent events, written to the connection with one write for all new output.

The callback that delivers tokens writes them directly, without switching to a task. Writing pauses while the client
does not read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec
from starlette.types import Message, Receive, Send

from ...client.engine_client import RequestGroup, Sequence
from ...client.groups.hidden_states import complete_states
from ...http.continued_response import ResponseRecord
from ...http.errors import APIError, internal_error
from ...http.json_pieces import encode_whole
from ..generation import ClientWatch

logger = logging.getLogger(__name__)

WRITE_S: Final = 0.002
"""Seconds that a stream encodes before other streams and callbacks run."""

KEEP_ALIVE_S: Final = 15.0
"""Seconds without a chunk before a keep-alive is sent, so that proxies keep the connection open."""


def event(content: object) -> bytes:
    """Return a server-sent event with the content as JSON."""
    return b"data: %b\n\n" % encode_whole(content)


def error_with_retry(error: APIError) -> dict[str, object]:
    """Return the body of an error, with `retry_after` in it because the headers have been sent already."""
    body = error.body
    if (seconds := error.headers.get("retry-after")) is not None:
        body["error"]["retry_after"] = int(seconds)
    return body


class StreamFormat(msgspec.Struct, frozen=True):
    """The parts of a stream that surround its chunks, in the format of a dialect.

    Attributes:
        content_type: The value of the Content-Type header.
        keep_alive: Bytes that are sent during silence, and that clients ignore; b"" if the format has none.
        done: Bytes after the last chunk.
        encode_error: Encodes the error that ends a stream.
        has_ids: True if a chunk can have an event ID, with which a client can resume.
    """

    content_type: bytes
    keep_alive: bytes
    done: bytes
    encode_error: Callable[[APIError], bytes]
    has_ids: bool = False

    @property
    def start(self) -> Message:
        """The ASGI message that starts the response."""
        return {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", self.content_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        }


OPENAI_STREAM: Final = StreamFormat(
    content_type=b"text/event-stream; charset=utf-8",
    keep_alive=b": keep-alive\n\n",
    done=b"data: [DONE]\n\n",
    encode_error=lambda error: event(error_with_retry(error)),
    has_ids=True,
)


class Template(msgspec.Struct, frozen=True, gc=False):
    """A chunk that has nothing but text, as JSON without quotes, between `before` and `after`.

    If `id_start` is set, it and the number of tokens that were read come before the chunk.
    """

    before: bytes
    after: bytes
    id_start: bytes = b""


class ChunkEncoder(Protocol):
    """Encodes the new output of sequences as chunks of a stream."""

    @property
    def format(self) -> StreamFormat:
        """The format around the chunks."""

    def encode(self, sequence: Sequence) -> bytes:
        """Return the chunks of a sequence; b"" if its output needs none. Raise APIError if the sequence failed."""

    def template(self) -> Template | None:
        """Return the parts of a chunk with the text of the only sequence, by default None: `encode` writes each chunk.

        Chunks after the sequence's first output, and before its end, are filled into it.
        """
        return None

    def closing(self) -> bytes:
        """Return the chunks between the last output and the end of the stream, by default none."""
        return b""


class ChunkWriter(Protocol):
    """The client's connection, without the ASGI layers, which only add headers.

    `is_paused` is true while the client reads too slowly. `on_writable` is called when the client reads again or
    disconnects.
    """

    is_paused: bool
    on_writable: Callable[[], None] | None
    has_chunks: bool
    """False for HTTP/1.0, where a stream ends by closing the connection."""

    def begin_stream(self) -> None:
        """Prepare to stream a response without a Content-Length. Called before the response starts."""

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of the body of a response that has started. This does nothing after a disconnect."""


class EventStream:
    """One streamed response.

    It starts with the first write, so that an earlier failure can still set the HTTP status. `sent` is the record of
    the connection, if it has one.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_ended",
        "_group",
        "_incomplete",
        "_keep_alive_s",
        "_send",
        "_sent",
        "_sequence",
        "_started",
        "_template",
        "_was_silent",
        "_write_chunk",
    )

    def __init__(
        self,
        send: Send,
        connection: ChunkWriter,
        keep_alive_s: float = KEEP_ALIVE_S,
        sent: ResponseRecord | None = None,
    ) -> None:
        self._send = send
        self._sent = sent
        self._connection = connection
        # A connection has many attributes, so looking up a method takes longer than calling it.
        self._write_chunk = connection.write_chunk
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._was_silent = False
        self._incomplete: list[Sequence] = []
        """Sequences that have ended, and whose hidden states may not be complete yet."""

    async def run(
        self,
        receive: Receive,
        group: RequestGroup,
        chunks: ChunkEncoder,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Write until every sequence has finished or the client has disconnected.

        While the client does not read, new output accumulates and later becomes one chunk. `before_end` is called
        before the client receives the end.

        Raises:
            APIError: The request failed before anything was written.
        """
        self._group, self._sequence, self._chunks = group, group.sequences[0], chunks
        self._template = chunks.template()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            with ClientWatch(receive, group, lambda: self._end(None)) as watch:
                first = await self._read_first()
                self._started = True
                self._connection.begin_stream()
                await self._send(chunks.format.start)
                await self._write_all(first)
                if watch.disconnected:
                    return
                end = await self._encode_completed() + chunks.closing()
        except APIError as error:
            if not self._started:
                raise
            end = chunks.format.encode_error(error)
        except Exception:
            if not self._started:
                raise
            logger.exception("a stream failed")
            end = chunks.format.encode_error(internal_error("Internal server error"))
        if watch.disconnected:
            return
        if before_end is not None:
            await before_end()
        body = end + chunks.format.done
        if not self._connection.has_chunks:
            self._connection.write_chunk(body)
            body = b""
        if self._sent is not None:
            self._sent.add_end(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _read_first(self) -> bytes:
        """Return the first events, or a keep-alive if none come in `keep_alive_s`."""
        body = b""
        try:
            async with asyncio.timeout(self._keep_alive_s):
                while not body and (update := await self._group.wait_for_updates()):
                    body = self._encode(update)
                    if not body:
                        await asyncio.sleep(0)
        except TimeoutError:
            return self._chunks.format.keep_alive
        return body

    async def _write_all(self, first: bytes) -> None:
        group, connection = self._group, self._connection
        keep_alive = asyncio.create_task(self._keep_alive())
        group.on_update, connection.on_writable = self._write_updates, group.wake_soon
        try:
            if first:
                connection.write_chunk(first)
            elif self._sent is not None:
                # From here on, the head is not sent again.
                self._sent.add(b"")
            group.wake_soon()
            await self._ended
        finally:
            self._detach()
            keep_alive.cancel()

    def _write_updates(self) -> bool:
        """Write new output for about `WRITE_S`. Return whether there is more."""
        if self._connection.is_paused:
            return False
        group = self._group
        try:
            if body := self._encode(group.take_updates()):
                self._was_silent = False
                self._write_chunk(body)
                if len(group.sequences) == 1 and self._sequence.num_read_tokens:
                    self._sequence.fast_stream = self
        except Exception as error:
            self._end(error)
            return False
        if group.updates:
            return True
        # Output that the stream itself will still try to write is not in `updates`.
        if not group.num_unfinished and not self._sequence.has_updates:
            self._end(None)
        return False

    def encode(self) -> bytes:
        """Return new output encoded; b"" if the group's reader must write it: the end, or while the client is slow."""
        sequence, group = self._sequence, self._group
        body = b""
        try:
            if self._connection.is_paused or sequence.finish_reason is not None:
                group.updates.append(sequence)
            elif (template := self._template) is None:
                body = self._chunks.encode(sequence)
            elif text := sequence.read_as_json():
                body = b"".join((template.before, text, template.after))
                if template.id_start:
                    body = b"%b%d%b" % (template.id_start, sequence.num_read_tokens, body)
            if group.updates:
                group.wake_soon()
        except Exception as error:
            self._end(error)
        return body

    def write(self, body: bytes) -> None:
        """Write what `encode` has returned."""
        try:
            if body:
                self._was_silent = False
                # Python does not cache the lookup of a method call if the method is in a slot.
                write_chunk = self._write_chunk
                write_chunk(body)
        except Exception as error:
            self._end(error)

    def _encode(self, update: list[Sequence]) -> bytes:
        """Return the events of the first of these sequences. Give the others back to the group after `WRITE_S`.

        Raises:
            APIError: A sequence failed.
        """
        encode = self._encode_sequence
        if len(update) == 1:
            return encode(update[0])
        end = time.monotonic() + WRITE_S
        pieces: list[bytes] = []
        for num_read, sequence in enumerate(update, 1):
            pieces.append(encode(sequence))
            if num_read < len(update) and time.monotonic() > end:
                self._group.give_back(update[num_read:])
                break
        return b"".join(pieces)

    def _encode_sequence(self, sequence: Sequence) -> bytes:
        if sequence.states is None or sequence.finish_reason is None:
            return self._chunks.encode(sequence)
        sequence.has_updates = False
        self._incomplete.append(sequence)
        return b""

    async def _encode_completed(self) -> bytes:
        """Wait for the hidden states of the sequences that have ended, and return the last events of these."""
        await complete_states(self._incomplete)
        return b"".join(map(self._chunks.encode, self._incomplete))

    def _end(self, error: Exception | None) -> None:
        """Stop writing immediately, although the task of `run` may resume later."""
        self._detach()
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _detach(self) -> None:
        self._group.on_update = self._connection.on_writable = None
        self._sequence.fast_stream = None

    async def _keep_alive(self) -> None:
        """Send something during silence, because proxies close silent connections."""
        keep_alive = self._chunks.format.keep_alive
        while keep_alive:
            self._was_silent = True
            await asyncio.sleep(self._keep_alive_s)
            if self._was_silent and not self._connection.is_paused:
                self._connection.write_chunk(keep_alive)
