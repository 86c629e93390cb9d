"""Server-sent events straight on ASGI: one write for all that is new, and the client's pace kept."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import msgspec
from starlette.types import Receive, Send

from ..engine_client import Delta, RequestGroup
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
    """One response. It starts with its first write, so that an earlier failure still gets its status."""

    def __init__(self, send: Send, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._num_writes = 0

    async def run(self, receive: Receive, group: RequestGroup, chunks: ChunkEncoder) -> None:
        """Write until every sequence has finished or the client is gone.

        Waits while the client does not read; what its sequences say meanwhile becomes one chunk.
        Raises APIError if the request fails before anything was written.
        """
        keep_alive = asyncio.create_task(self._keep_alive())
        try:
            with ClientWatch(receive, group) as watch:
                while news := await group.next():
                    if watch.disconnected:
                        return
                    if body := chunks.encode(news):
                        await self._write(body)
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
            keep_alive.cancel()
        await self._write(end + DONE, more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send(_START)
        self._num_writes += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _keep_alive(self) -> None:
        """Proxies drop a connection that says nothing; comments are not seen by the client."""
        seen = 0
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._num_writes == seen:
                await self._write(KEEP_ALIVE)
            seen = self._num_writes
