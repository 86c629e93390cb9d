"""Server-sent events of an answer that comes from several sequences, one after the other."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from ...http.errors import APIError
from ...http.routing import Asgi
from .event_stream import KEEP_ALIVE_S, OPENAI_STREAM, ChunkWriter, StreamFormat, event


class TextEvents:
    """One streamed response. Enter it as a context until it ends.

    It starts with its first event, or after some seconds of silence. An error after that is sent as an event.
    """

    def __init__(
        self,
        asgi: Asgi,
        keep_alive_s: float = KEEP_ALIVE_S,
        form: StreamFormat = OPENAI_STREAM,
    ) -> None:
        self._send = asgi.send
        self._connection: ChunkWriter = asgi.state["connection"]
        self._format = form
        self._keep_alive_s = keep_alive_s
        self._is_started = False
        self._wrote_at = time.monotonic()
        # Comments and events are sent by two tasks.
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._keeper.cancel()
        if error is None:
            await self._end(self._format.done)
            return True
        if isinstance(error, APIError) and self._is_started:
            await self._end(self._format.encode_error(error) + self._format.done)
            return True
        return False

    async def write(self, content: object) -> None:
        """Send an event, and wait while the client does not read."""
        await self.write_encoded(event(content))

    async def write_encoded(self, data: bytes) -> None:
        """Send events that are encoded already, and wait while the client does not read."""
        async with self._writing:
            if not self._is_started:
                self._is_started = True
                self._connection.begin_stream()
                await self._send(self._format.start)
            self._wrote_at = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        await self.write_encoded(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self) -> None:
        """Send comments during silence, because proxies close silent connections. Clients ignore comments."""
        while True:
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= self._keep_alive_s:
                await self.write_encoded(self._format.keep_alive)
                continue
            await asyncio.sleep(self._keep_alive_s - silent_s)
