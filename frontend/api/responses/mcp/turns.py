"""Answer a request with tools of MCP servers: the model writes, its calls are run, until it calls no more tools.

Each turn is a response of its own that the client does not see: with the items of all turns before it as context.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.types import Message

from ....http.errors import APIError, bad_request, internal_error
from ....http.routing import Asgi
from ...logprobs import Json
from ...schema.responses import ResponseFields, ResponsesRequest
from ..answer import describe_failure
from ..request import Exchange
from .output import McpOutput, add_usage, approved_calls
from .session import Call, CallResult, McpSession
from .tools import MCP, McpTool, choose_tool, parse_tools

MAX_CALLS: Final = 128
"""Maximum number of calls of a response, unless `max_tool_calls` is lower."""

MAX_WAITING: Final = 64
"""Number of pieces of a turn that wait before the turn pauses."""

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "

_decode = msgspec.json.Decoder().decode

Write = Callable[[bytes], Awaitable[None]]
"""Sends events to the client."""

Generate = Callable[["Turn", Exchange, int], Coroutine[Any, Any, None]]
"""Generates the response of a turn, which is the client of it; the number of the turn is the last argument."""

Describe = Callable[[Exchange, str], Json]
"""Returns the response to a request, without output, with a status."""


class Turn:
    """Stands in for the client of one turn, and for its background run.

    Attributes:
        has_begun: Set once the engine has accepted the turn.
    """

    has_chunks = True

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.on_writable: Callable[[], None] | None = None
        self.response: Json | None = None
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        """True while the client of the whole response does not read."""
        return len(self._pieces) > MAX_WAITING

    def begin_stream(self) -> None:
        """Do nothing, because there is no connection to prepare."""

    def write_chunk(self, data: bytes) -> None:
        """Store the next bytes of the turn's events."""
        self._pieces.append(data)
        self._changed.set()

    def asgi(self, whole: Asgi, number: int) -> Asgi:
        """Return the request of this turn, the one with this number, of the request for the whole response."""
        request_id = f"{whole.state['request_id']}-{number}"
        state = {**whole.state, "request_id": request_id, "connection": self}
        return Asgi({**whole.scope, "state": state}, self.receive, self.send)

    async def receive(self) -> Message:
        """Wait for ever: if the client of the whole response disconnects, the turn is cancelled."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(self, message: Message) -> None:
        """Add the events of a message."""
        if message["type"] == "http.response.body":
            self.write_chunk(message.get("body", b""))

    def accept(self, group: object) -> None:
        """Record that the engine has accepted the turn."""
        self.has_begun.set()

    async def events(self, work: asyncio.Task[None]) -> AsyncIterator[Json]:
        """Yield the events until `work` has ended. Raise APIError if the turn failed before its first event."""
        work.add_done_callback(lambda task: self._changed.set())
        while True:
            self._changed.clear()
            is_done = work.done()
            while self._pieces:
                for event in self._pieces.popleft().split(_EVENT_END):
                    _, found, content = event.rpartition(_DATA)
                    if found and not event.startswith(b":"):
                        yield _decode(content)
            if is_done:
                await work
                return
            if self.on_writable is not None:
                self.on_writable()
            await self._changed.wait()


def show_tools(body: ResponseFields, tools: Mapping[str, McpTool]) -> list[Json]:
    """Return the tools of a request, with those of MCP servers as namespaces of functions."""
    return [
        tools[tool["server_label"]].namespace if tool.get("type") == MCP else tool
        for tool in body.tools or ()
    ]


async def with_listed_tools(
    body: ResponseFields, items: list[Json], servers: Mapping[str, str]
) -> ResponseFields:
    """Return a request with the tools of its MCP servers as namespaces of functions.

    Raises:
        APIError: A field of a tool is invalid (400), or a server does not answer (424).
    """
    tools = parse_tools(body.tools, servers)
    async with McpSession(tools.values()) as session:
        await session.list_tools(items)
    choice = choose_tool(body.tool_choice, tools)
    return replace(body, tools=show_tools(body, tools), tool_choice=choice)


class McpTurns:
    """The turns of one response.

    Args:
        exchange: The request.
        servers: The MCP servers that may be called: label -> URL.
        generate: Generates a turn.
        describe: Describes the response.

    Raises:
        APIError: A field is invalid, or a server may not be called (400).
    """

    def __init__(
        self,
        exchange: Exchange,
        servers: Mapping[str, str],
        generate: Generate,
        describe: Describe,
    ) -> None:
        self._exchange = exchange
        self._generate = generate
        self._describe = partial(describe, exchange)
        body = exchange.body
        if body.kv_transfer_params:
            raise bad_request("kv_transfer_params", "cannot be combined with tools of type mcp")
        self._tools = parse_tools(body.tools, servers)
        self._output = McpOutput(exchange.response_id, self._tools)
        self._usage: Json = {}
        self._num_calls = 0
        wanted = MAX_CALLS if body.max_tool_calls is None else body.max_tool_calls
        self._max_calls = min(wanted, MAX_CALLS)

    async def run(self, write: Write, on_begin: Callable[[], None] = lambda: None) -> Json:
        """Return the finished response. `on_begin` is called once the engine has accepted the first turn.

        Raises:
            APIError: The first turn failed before its first event, or a server does not answer (424).
        """
        output, exchange = self._output, self._exchange
        async with McpSession(self._tools.values()) as session:
            new = await session.list_tools([*exchange.context, *exchange.input])
            output.writer.emit("response.created", response=self._describe("in_progress"))
            output.writer.emit("response.in_progress", response=self._describe("in_progress"))
            for tool in new:
                output.add_list(tool)
            for item in approved_calls([*exchange.context, *exchange.input]):
                if item["server_label"] in self._tools:
                    label, name = item["server_label"], item["name"]
                    output.begin_call(name, label, item["arguments"], item["id"])
            await self._run_calls(session)
            number = 0
            while True:
                output.begin_turn()
                await self._run_turn(number, write, on_begin)
                final = output.final
                assert final is not None
                self._usage = add_usage(self._usage, final["usage"] or {})
                calls = output.calls()
                await self._run_calls(session)
                await write(output.writer.take())
                if not calls or output.waits_for_client or final["status"] != "completed":
                    break
                if self._num_tokens_left() == 0:
                    final |= {"status": "incomplete"}
                    final["incomplete_details"] = {"reason": "max_output_tokens"}
                    break
                number += 1
        return self._finish(final)

    def closing(self, response: Json) -> bytes:
        """Return the last event, which has the finished response."""
        self._output.writer.emit(f"response.{response['status']}", response=response)
        return self._output.writer.take()

    def _body(self, *, is_first: bool) -> ResponsesRequest:
        body = self._exchange.body
        choice: Any = choose_tool(body.tool_choice, self._tools)
        if not is_first and (isinstance(choice, dict) or choice == "required"):
            # Else the model would have to call tools for ever.
            choice = "auto"
        if self._num_calls >= self._max_calls:
            choice = "none"
        return replace(
            body,
            tools=show_tools(body, self._tools),
            tool_choice=choice,
            max_output_tokens=self._num_tokens_left(),
            max_tool_calls=None,
            stream=True,
            store=False,
            background=None,
            previous_response_id=None,
            conversation=None,
        )

    def _num_tokens_left(self) -> int | None:
        limit = self._exchange.body.max_output_tokens
        return None if limit is None else max(0, limit - self._usage.get("output_tokens", 0))

    async def _run_turn(self, number: int, write: Write, on_begin: Callable[[], None]) -> None:
        exchange, output = self._exchange, self._output
        inner = Exchange(
            self._body(is_first=number == 0),
            exchange.response_id,
            exchange.created_at,
            [],
            [*exchange.context, *exchange.input, *output.items],
            exchange.owner,
        )
        turn = Turn()
        work = asyncio.create_task(self._generate(turn, inner, number))
        try:
            async for event in turn.events(work):
                if number == 0 and turn.has_begun.is_set():
                    on_begin()
                if event["type"] == "error":
                    raise APIError(500, event["message"], code=event["code"])
                output.add_event(event)
                if events := output.writer.take():
                    await write(events)
        except APIError as error:
            if number == 0:
                raise
            output.final = self._describe("failed") | {"error": describe_failure(error)}
        finally:
            work.cancel()
            await asyncio.wait({work})
        if output.final is None:
            raise internal_error("a turn ended without a response")

    async def _run_calls(self, session: McpSession) -> None:
        calls: list[Call] = self._output.calls()
        num_left = max(0, self._max_calls - self._num_calls)
        self._num_calls += len(calls)
        if calls:
            results = await session.call_all(calls[:num_left])
            refused = CallResult(None, f"the response has its limit of calls, {self._max_calls}")
            self._output.end_calls(results + [refused] * len(calls[num_left:]))

    def _finish(self, final: Json) -> Json:
        """Return the whole response, for the last turn's."""
        response: Json = self._describe(final["status"])
        for name in ("error", "incomplete_details", "completed_at"):
            response[name] = final[name]
        return response | {"output": self._output.items, "usage": self._usage or None}
