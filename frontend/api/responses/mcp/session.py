"""Connections to MCP servers (Model Context Protocol, https://modelcontextprotocol.io) for one response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from ....http.errors import APIError, bad_request, echo
from ...logprobs import Json
from .tools import LISTED, McpTool, read_arguments

if TYPE_CHECKING:
    from types import TracebackType

    from mcp import Client

logger = logging.getLogger(__name__)
# It logs every request to a server.
logging.getLogger("httpx2").setLevel(logging.WARNING)

CONNECT_S: Final = 15.0
"""Maximum seconds until a server has listed its tools."""
CALL_S: Final = 120.0
"""Maximum seconds of a call."""
MAX_TOOLS: Final = 256
"""Maximum number of tools of one server."""
MAX_CHARACTERS: Final = 1 << 20
"""Maximum characters of the output of a call, or of the description of all tools."""


class Call(NamedTuple):
    """A call of a tool: the server, the tool, and the arguments as the model wrote them."""

    label: str
    name: str
    arguments: str


class CallResult(NamedTuple):
    """The output of a call, or the error."""

    output: str | None
    error: str | None


class McpSession:
    """The connections to the servers of one response. Enter it as a context until no more tools are called."""

    def __init__(self, tools: Iterable[McpTool]) -> None:
        self._tools = {tool.label: tool for tool in tools}
        self._clients: dict[str, Client] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The answer is complete, so a server that cannot be told that the session ends changes nothing.
        with contextlib.suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(CONNECT_S):
                await self._stack.aclose()

    async def list_tools(self, items: Iterable[Json]) -> list[McpTool]:
        """Fill in the tools of all servers. Return those whose tools `items` did not list already.

        Raises:
            APIError: A server does not answer (424), or has too many tools (400).
        """
        listed = {item.get("server_label"): item for item in items if item["type"] == LISTED}
        new = []
        for tool in self._tools.values():
            item = listed.get(tool.label)
            if item is not None and isinstance(item.get("tools"), list):
                tool.tools = item["tools"]
                continue
            try:
                async with asyncio.timeout(CONNECT_S):
                    tool.tools = await self._list(tool)
            except APIError:
                raise
            except Exception as error:
                logger.info("cannot list the tools of %s: %s", tool.url, _describe(error))
                raise APIError(
                    424,
                    f"Error retrieving tool list from MCP server {echo(tool.label)}: {_describe(error)}",
                    type="external_connector_error",
                    param="tools",
                    code="http_error",
                ) from None
            new.append(tool)
        return new

    async def call_all(self, calls: Sequence[Call]) -> list[CallResult]:
        """Run calls at the same time, and return their results in the same order."""
        for label in {call.label for call in calls} - self._clients.keys():
            # A connection must be opened and closed by the same task. A failure is reported by the calls.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONNECT_S):
                    await self._connect(self._tools[label])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _call(self, call: Call) -> CallResult:
        client = self._clients.get(call.label)
        if client is None:
            return CallResult(None, "the server does not answer")
        try:
            given = read_arguments(call.arguments)
            async with asyncio.timeout(CALL_S):
                result = await client.call_tool(call.name, given, CALL_S)
        except Exception as error:
            return CallResult(None, _describe(error))
        text = _text_of(result.content)
        if not text and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content).decode()
        if len(text) > MAX_CHARACTERS:
            return CallResult(None, f"the output has more than {MAX_CHARACTERS} characters")
        if result.is_error:
            return CallResult(None, text or "the tool failed")
        return CallResult(text, None)

    async def _list(self, tool: McpTool) -> list[Json]:
        client = await self._connect(tool)
        found: list[Json] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += (
                {
                    "name": each.name,
                    "description": each.description,
                    "input_schema": each.input_schema,
                    "annotations": each.annotations
                    and each.annotations.model_dump(by_alias=True, exclude_none=True),
                }
                for each in page.tools
            )
            cursor = page.next_cursor
            if cursor is None:
                break
            if len(found) > MAX_TOOLS:
                break
        if len(found) > MAX_TOOLS:
            problem = f"has a server with more than {MAX_TOOLS} tools; choose another one"
            raise bad_request(tool.where, problem)
        if (size := len(msgspec.json.encode(found))) > MAX_CHARACTERS:
            problem = f"has tools of {size} characters, at most {MAX_CHARACTERS} are allowed"
            raise bad_request(tool.where, problem)
        return found

    async def _connect(self, tool: McpTool) -> Client:
        if tool.label not in self._clients:
            open_client = await asyncio.to_thread(_import_library)
            self._clients[tool.label] = await open_client(tool, self._stack, CALL_S)
        return self._clients[tool.label]


def _import_library() -> Callable[[McpTool, AsyncExitStack, float], Awaitable[Client]]:
    """Import the library, which takes half a second and which few servers need."""
    from .connection import open_client

    return open_client


def _text_of(parts: Iterable[Any]) -> str:
    """Return the texts of the output of a call. Of other parts, only their kind is shown to the model."""
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in parts)


def _describe(error: BaseException) -> str:
    """Return the reason of a failure. The library puts it into groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    return str(error) or type(error).__name__
