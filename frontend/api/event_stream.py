"""Server-sent events straight on ASGI: one write for all that is new, and the client's pace kept.

A token is written from the callback that brings it. No task runs for it, unless the client does not keep up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Final, Protocol

import msgspec
from starlette.types import Message, Receive, Send

from ..engine_client import Delta, RequestGroup
from .eager import run_until_wait
from .errors import APIError, internal_error
from .generation import ClientWatch

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 15.0
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

_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    return b"data: %b\n\n" % _encode(content)


class ChunkEncoder(Protocol):
    """Turns the news of a group into events."""

    def encode(self, news: list[tuple[int, Delta]]) -> bytes:
        """Events, or b"" for news that the client need not hear of. Raises APIError."""

    def closing(self) -> bytes:
        """Events after the last news, before `[DONE]`."""


class EventStream:
    """One response. It starts with its first write, so that an earlier failure still gets its status.

    `send_body` takes what follows the start; it is the server's own, past the layers that add headers.
    """

    def __init__(self, send: Send, send_body: Send, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._send = send
        self._send_body = send_body
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._num_writes = 0
        self._blocked: asyncio.Task[None] | None = None

    async def run(self, receive: Receive, group: RequestGroup, chunks: ChunkEncoder) -> None:
        """Write until every sequence has finished or the client is gone.

        Waits while the client does not read; what its sequences say meanwhile becomes one chunk.
        Raises APIError if the request fails before anything was written.
        """
        self._group, self._chunks = group, chunks
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keep_alive = asyncio.create_task(self._keep_alive())
        try:
            with ClientWatch(receive, group) as watch:
                group.on_news = self._write_news
                self._write_news()
                await self._ended
                if watch.disconnected:
                    return
                end = chunks.closing()
        except APIError as error:
            if not self._started:
                raise
            end = event(error.body)
        except Exception:
            if not self._started:
                raise
            logger.exception("a stream failed")
            end = event(internal_error("Internal server error").body)
        finally:
            group.on_news = None
            keep_alive.cancel()
            if self._blocked is not None:
                self._blocked.cancel()
        await self._write(end + DONE, more=False)

    def _write_news(self) -> None:
        if self._blocked is not None or self._ended.done():
            return
        try:
            body = self._chunks.encode(self._group.read())
            if body:
                self._blocked = run_until_wait(self._write(body))
        except Exception as error:
            self._ended.set_exception(error)
            return
        if self._blocked is not None:
            self._blocked.add_done_callback(self._go_on)
        elif not self._group.num_unfinished:
            self._ended.set_result(None)

    def _go_on(self, written: asyncio.Task[None]) -> None:
        """The client has read what it was sent before."""
        self._blocked = None
        if written.cancelled() or self._ended.done():
            return
        if (error := written.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._write_news()

    def _write(self, body: bytes, more: bool = True) -> Awaitable[None]:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        self._num_writes += 1
        return self._send_body(message) if self._started else self._start(message)

    async def _start(self, message: Message) -> None:
        self._started = True
        await self._send(_START)
        await self._send_body(message)

    async def _keep_alive(self) -> None:
        """Proxies drop a connection that says nothing; comments are not seen by the client."""
        seen = 0
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._num_writes == seen:
                await self._write(KEEP_ALIVE)
            seen = self._num_writes
