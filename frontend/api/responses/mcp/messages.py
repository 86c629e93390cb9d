"""`POST /v1/messages` of Anthropic's API with tools of MCP servers (`mcp_servers`), which the server calls itself.

Each turn is a message of its own that the client does not see, with the results of the turns before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from msgspec import json
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ....http.errors import (
    APIError,
    bad_request,
    echo,
    expect,
    internal_error,
    json_response,
    renaming,
)
from ...bodies.disconnection import while_connected
from ...bodies.request_memory import MemoryLease
from ...dialects.anthropic import MESSAGES_STREAM, Messages, decode_input, message_event
from ...dialects.anthropic_request import MessagesPrompt
from ...durable.keeper import Keeper
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...schema.anthropic import MessagesRequest
from ...streaming.text_events import TextEvents
from .session import Call, McpSession
from .tools import MCP, McpTool, parse_tools
from .turns import MAX_CALLS, Turn

TOOLSET: Final = "mcp_toolset"

_USE: Final = "mcp_tool_use"
_RESULT: Final = "mcp_tool_result"
_ID: Final = "mcptoolu_"
_NAMES: Final = {
    "server_label": "name",
    "server_url": "url",
    "authorization": "authorization_token",
}

Write = Callable[[bytes], Awaitable[None]]
Generate = Callable[[Turn, MessagesRequest, int], Coroutine[Any, Any, None]]


class McpMessagesPrompt(MessagesPrompt, kw_only=True):
    """A request with tools of MCP servers. Its fields are in the `body`, which each turn changes."""

    body: Any = None


class McpMessages(Messages):
    """The route `/v1/messages`, also for requests with `mcp_servers`."""

    async def _translate(
        self, body: MessagesRequest, size: int, lease: MemoryLease
    ) -> tuple[ChatCompletionRequest, int]:
        if not body.mcp_servers:
            return await super()._translate(body, size, lease)
        if body.max_tokens is None:
            raise bad_request("max_tokens", "is required")
        return McpMessagesPrompt(model=body.model, stream=body.stream, messages=[], body=body), size

    async def _generate(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        lease: MemoryLease,
        request: ChatCompletionRequest,
        body_size: int,
        deadline: float,
        keeper: Keeper | None = None,
    ) -> None:
        if not isinstance(request, McpMessagesPrompt):
            await super()._generate(
                scope, receive, send, lease, request, body_size, deadline, keeper
            )
            return
        serving, state = self._serving, scope["state"]
        serving.verify_model(request.model)
        serving.verify_serving()

        async def generate(turn: Turn, body: MessagesRequest, number: int) -> None:
            identity = {"request_id": f"{state['request_id']}-{number}", "connection": turn}
            place = {**scope, "state": {**state, **identity}}
            with self._intake.lease() as inner:
                chat, size = await super(McpMessages, self)._translate(body, body_size, inner)
                await super(McpMessages, self)._generate(
                    place, turn.receive, turn.send, inner, chat, size, deadline
                )

        turns = _Turns(request.body, serving.config.frontend.mcp_servers, generate)
        if request.stream:
            silence_s = serving.config.frontend.max_silence_s
            async with TextEvents(send, state["connection"], silence_s, MESSAGES_STREAM) as stream:
                await while_connected(receive, turns.run(stream.write_encoded))
            return
        message = await while_connected(receive, turns.run(_drop))
        await json_response(message)(scope, receive, send)


class _Turns:
    """The turns of one message.

    Raises:
        APIError: A server may not be called, or a field is invalid (400).
    """

    def __init__(
        self, body: MessagesRequest, servers: Mapping[str, str], generate: Generate
    ) -> None:
        self._generate = generate
        self._body = body
        given = [_tool_of(server, i) for i, server in enumerate(body.mcp_servers or ())]
        with renaming(_sent_name):
            self._tools = parse_tools(given, servers)
        self._toolsets = _toolsets(body, self._tools)
        # Name of a function as the model calls it -> the server, and the tool.
        self._functions: dict[str, tuple[str, str]] = {}
        # The message without its content, and the content.
        self._message: Json = {}
        self._content: list[Json] = []
        self._usage: Json = {}
        self._num_calls = 0

    async def run(self, write: Write) -> Json:
        """Return the finished message.

        Raises:
            APIError: A turn failed, or a server does not answer (424).
        """
        messages = [part for each in self._body.messages or () for part in _plain(each)]
        async with McpSession(self._tools.values()) as session:
            with renaming(lambda name: "mcp_servers" if name == "tools" else name):
                await session.list_tools(())
            self._allow_tools()
            number = 0
            while True:
                first = len(self._content)
                ending = await self._run_turn(messages, number, write)
                turn = self._content[first:]
                calls = [block for block in turn if block["type"] == _USE]
                if ending["stop_reason"] == "tool_use" and calls:
                    results = await self._run_calls(session, calls, write)
                    messages += _as_turns([*turn, *results])
                    is_done = any(block["type"] == "tool_use" for block in turn)
                else:
                    is_done = True
                if is_done or self._num_tokens_left() <= 0:
                    break
                number += 1
        if not is_done:
            ending |= {"stop_reason": "max_tokens"}
        await write(message_event("message_delta", delta=ending, usage=self._usage))
        await write(message_event("message_stop"))
        return self._message | {"content": self._content} | ending | {"usage": self._usage}

    def _num_tokens_left(self) -> int:
        return (self._body.max_tokens or 0) - int(self._usage.get("output_tokens", 0))

    def _allow_tools(self) -> None:
        """Apply the choices of tools, for which their names must be known."""
        for label, (is_default, choices) in self._toolsets.items():
            names = [tool["name"] for tool in self._tools[label].tools]
            allowed = [name for name in names if choices.get(name, is_default)]
            self._tools[label].allowed = frozenset(allowed)

    def _turn_body(self, messages: list[Json], *, is_first: bool) -> MessagesRequest:
        tools = [tool for tool in self._body.tools or () if tool.get("type") != TOOLSET]
        for server in self._tools.values():
            for function in server.namespace["tools"]:
                shown = _shown(server.label, function["name"])
                self._functions[shown] = server.label, function["name"]
                schema: Json = function["parameters"] or {"type": "object"}
                tool: Json = {"name": shown, "input_schema": schema}
                if function["description"]:
                    tool["description"] = function["description"]
                tools.append(tool)
        choice = self._choice(tools)
        if not is_first and choice is not None and choice.get("type") in ("any", "tool"):
            # Else the model would have to call tools for ever.
            choice = {**choice, "type": "auto"}
        if self._num_calls >= MAX_CALLS:
            choice = {"type": "none"}
        return replace(
            self._body,
            messages=messages,
            tools=tools or None,
            tool_choice=choice,
            max_tokens=self._num_tokens_left(),
            mcp_servers=None,
            stream=True,
        )

    def _choice(self, tools: list[Json]) -> Json | None:
        """Return the choice of a tool, whose name may be that of a server's tool if no other tool has it."""
        choice = self._body.tool_choice
        if choice is None or any(tool.get("name") == choice.get("name") for tool in tools):
            return choice
        names = [
            shown for shown, (_, name) in self._functions.items() if name == choice.get("name")
        ]
        return {**choice, "name": names[0]} if len(names) == 1 else choice

    async def _run_turn(self, messages: list[Json], number: int, write: Write) -> Json:
        """Add the content of a turn, and return the fields that describe why it ended."""
        body = self._turn_body(messages, is_first=number == 0)
        turn = Turn()
        work = asyncio.create_task(self._generate(turn, body, number))
        first = len(self._content)
        ending: Json | None = None
        pieces: list[str] = []
        try:
            async for event in turn.events(work):
                match event["type"]:
                    case "message_start":
                        if number == 0:
                            self._message = event["message"]
                            await write(message_event("message_start", message=self._message))
                    case "content_block_start":
                        block = self._shown_block(event["content_block"])
                        self._content.append(block)
                        pieces = []
                        index = first + event["index"]
                        await write(
                            message_event("content_block_start", index=index, content_block=block)
                        )
                    case "content_block_delta":
                        self._add_delta(event["delta"], pieces)
                        await write(_moved(event, first))
                    case "content_block_stop":
                        if self._content[-1]["type"] in ("tool_use", _USE):
                            self._content[-1]["input"] = decode_input("".join(pieces))
                        await write(_moved(event, first))
                    case "message_delta":
                        ending = event["delta"]
                        self._add_usage(event["usage"])
                    case "error":
                        raise APIError(500, event["error"]["message"])
        finally:
            work.cancel()
            await asyncio.wait({work})
        if ending is None:
            raise internal_error("a turn ended without a message")
        return ending

    def _shown_block(self, block: Json) -> Json:
        """Return a block as the client sees it. A call of a server's tool names the server."""
        if block["type"] != "tool_use" or block["name"] not in self._functions:
            return block
        label, name = self._functions[block["name"]]
        call_id = _ID + block["id"].rpartition("_")[2]
        return {"type": _USE, "id": call_id, "name": name, "server_name": label, "input": {}}

    def _add_delta(self, delta: Json, pieces: list[str]) -> None:
        block = self._content[-1]
        match delta["type"]:
            case "input_json_delta":
                pieces.append(delta["partial_json"])
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]

    def _add_usage(self, usage: Json) -> None:
        for name, value in usage.items():
            if isinstance(value, int):
                self._usage[name] = self._usage.get(name, 0) + value
            else:
                self._usage[name] = value

    async def _run_calls(self, session: McpSession, uses: list[Json], write: Write) -> list[Json]:
        """Run calls, add their results to the content, and return these."""
        calls = [
            Call(use["server_name"], use["name"], json.encode(use["input"]).decode())
            for use in uses
        ]
        left = max(0, MAX_CALLS - self._num_calls)
        self._num_calls += len(calls)
        results = await session.call_all(calls[:left])
        blocks = []
        for i, use in enumerate(uses):
            output, error = (
                results[i] if i < left else (None, f"a message has at most {MAX_CALLS} calls")
            )
            text = {"type": "text", "text": output if error is None else error}
            block: Json = {"type": _RESULT, "tool_use_id": use["id"], "is_error": error is not None}
            block["content"] = [text]
            index = len(self._content)
            self._content.append(block)
            blocks.append(block)
            await write(message_event("content_block_start", index=index, content_block=block))
            await write(message_event("content_block_stop", index=index))
        return blocks


def _tool_of(server: Json, index: int) -> Json:
    """Return a server of a request as a tool of the Responses API."""
    where = f"mcp_servers[{index}]"
    if server.get("type", "url") != "url":
        raise bad_request(f"{where}.type", f'must be "url", got {echo(server.get("type"))}')
    tool: Json = {"type": MCP, "require_approval": "never"}
    tool |= {ours: server[name] for ours, name in _NAMES.items() if server.get(name) is not None}
    chosen = server.get("tool_configuration") or {}
    expect(chosen, dict, f"{where}.tool_configuration", "an object")
    names = [] if chosen.get("enabled") is False else chosen.get("allowed_tools")
    return tool if names is None else tool | {"allowed_tools": names}


def _sent_name(name: str) -> str:
    """Return the name in Anthropic's API of a field of a tool of the Responses API."""
    head, dot, field = name.partition(".")
    return head.replace("tools[", "mcp_servers[") + dot + _NAMES.get(field, field)


def _toolsets(
    body: MessagesRequest, tools: Mapping[str, McpTool]
) -> dict[str, tuple[bool, dict[str, bool]]]:
    """Return, by server, whether tools may be called by default, and the choices for single tools."""
    found: dict[str, tuple[bool, dict[str, bool]]] = {}
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") != TOOLSET:
            continue
        where, label = f"tools[{i}]", tool.get("mcp_server_name")
        if not isinstance(label, str) or label not in tools:
            raise bad_request(
                f"{where}.mcp_server_name", f"names none of the mcp_servers, got {echo(label)}"
            )
        default = expect(
            tool.get("default_config") or {}, dict, f"{where}.default_config", "an object"
        )
        configs = expect(tool.get("configs") or {}, dict, f"{where}.configs", "an object")
        is_default = default.get("enabled") is not False
        choices = {}
        for name, config in configs.items():
            place = f"{where}.configs.{name}"
            chosen = expect(config or {}, dict, place, "an object").get("enabled")
            choices[name] = is_default if chosen is None else bool(chosen)
        found[label] = is_default, choices
    return found


def _shown(label: str, name: str) -> str:
    """Return the name of a server's tool for the model."""
    return f"{label}__{name}"


def _plain(message: Json) -> list[Json]:
    """Return a message of the client with the calls of servers' tools as calls that the client ran."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    if not any(isinstance(each, dict) and each.get("type") in (_USE, _RESULT) for each in blocks):
        return [message]
    return _as_turns(blocks)


def _as_turns(blocks: list[Json]) -> list[Json]:
    """Return the blocks of an answer as messages: those of the assistant, and of the user with results."""
    turns: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        role, part = "assistant", block
        if kind == _USE:
            name = _shown(str(block.get("server_name")), str(block.get("name")))
            part = {
                "type": "tool_use",
                "id": block.get("id"),
                "name": name,
                "input": block.get("input"),
            }
        elif kind == _RESULT:
            role, part = "user", {**block, "type": "tool_result"}
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"].append(part)
    return turns


def _moved(event: Json, by: int) -> bytes:
    fields = {name: value for name, value in event.items() if name != "type"}
    return message_event(event["type"], **fields | {"index": event["index"] + by})


async def _drop(events: bytes) -> None:
    """Drop the events of a message that is not streamed."""
