"""Connections to MCP servers, whose answers have a limited size. Import it in a thread, because it takes long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

from httpx2 import AsyncByteStream, AsyncClient, Response
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from .tools import McpTool

MAX_BYTES: Final = 8 << 20
"""Maximum size of the answer to one request."""


class _LimitedStream(AsyncByteStream):
    """The body of an answer, which ends with an error at the limit."""

    def __init__(self, body: AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in self._body:
            num_bytes += len(piece)
            if num_bytes > MAX_BYTES:
                raise ValueError(f"the answer has more than {MAX_BYTES} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


async def open_client(tool: McpTool, stack: AsyncExitStack, timeout_s: float) -> Client:
    """Connect to the server of a tool until `stack` is closed. No request may take longer than `timeout_s`."""
    # A small compressed answer may have any size.
    headers = {**tool.headers, "Accept-Encoding": "identity"}
    http = AsyncClient(headers=headers, timeout=timeout_s, event_hooks={"response": [_limit]})
    transport: Any = streamable_http_client(
        tool.url, http_client=await stack.enter_async_context(http)
    )
    return await stack.enter_async_context(Client(transport, read_timeout_seconds=timeout_s))


async def _limit(response: Response) -> None:
    """Limit the size of an answer before its body is read."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise ValueError(
            f"the answer is compressed ({coding[:20]}), although that was not asked for"
        )
    assert isinstance(response.stream, AsyncByteStream)
    response.stream = _LimitedStream(response.stream)
