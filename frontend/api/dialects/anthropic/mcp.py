"""`POST /v1/messages` of Anthropic's API with tools of MCP servers (`mcp_servers`), which the server calls itself.

Each turn is a message of its own that the client does not see, with the results of the turns before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from msgspec import json
from msgspec.structs import replace

from ....http.errors import APIError, bad_request, internal_error, json_response, wrong
from ....http.routing import Asgi
from ...bodies.disconnection import while_connected
from ...bodies.request_memory import MemoryLease
from ...durable.keeper import Keeper
from ...logprobs import Json
from ...responses.mcp.session import Call, McpSession
from ...responses.mcp.turns import MAX_CALLS, Turn
from ...schema import ChatCompletionRequest
from ...schema.anthropic import MessagesRequest, ToolChoice
from ...streaming.text_events import TextEvents
from ..dialect import decode_input
from .mcp_tools import RESULT, USE, ServerTools, as_turns, plain_messages
from .messages import MESSAGES_STREAM, Messages, TokenCounter, message_event
from .request import MessagesPrompt

Write = Callable[[bytes], Awaitable[None]]
Generate = Callable[[Turn, MessagesRequest, int], Coroutine[Any, Any, None]]


class McpMessagesPrompt(MessagesPrompt, kw_only=True):
    """A request with tools of MCP servers. Its fields are in the `body`, which each turn changes."""

    body: Any = None


class McpMessages(Messages):
    """The route `/v1/messages`, also for requests with `mcp_servers`."""

    async def _translate(self, body: MessagesRequest, size: int) -> ChatCompletionRequest:
        if not body.mcp_servers:
            return await super()._translate(body, size)
        if body.max_tokens is None:
            raise bad_request("max_tokens", "is required")
        if body.max_tokens < 1:
            raise wrong("max_tokens", "at least 1 with mcp_servers", body.max_tokens)
        if body.kv_transfer_params:
            raise bad_request("kv_transfer_params", "cannot be combined with mcp_servers")
        return McpMessagesPrompt(model=body.model, stream=body.stream, messages=[], body=body)

    async def _generate(
        self,
        asgi: Asgi,
        lease: MemoryLease,
        request: ChatCompletionRequest,
        body_size: int,
        deadline: float,
        keeper: Keeper | None = None,
    ) -> None:
        if not isinstance(request, McpMessagesPrompt):
            await super()._generate(asgi, lease, request, body_size, deadline, keeper)
            return
        serving = self._serving
        serving.verify_model(request.model)
        serving.verify_serving()

        async def generate(turn: Turn, body: MessagesRequest, number: int) -> None:
            with self._intake.lease() as inner:
                chat = await super(McpMessages, self)._translate(body, body_size)
                await super(McpMessages, self)._generate(
                    turn.asgi(asgi, number), inner, chat, body_size, deadline
                )

        turns = _Turns(request.body, serving.config.frontend.mcp_servers, generate)
        if request.stream:
            silence_s = serving.config.frontend.max_silence_s
            async with TextEvents(asgi, silence_s, MESSAGES_STREAM) as stream:
                await while_connected(asgi.receive, turns.run(stream.write_encoded))
            return
        message = await while_connected(asgi.receive, turns.run(_drop))
        await json_response(message)(*asgi)


class McpTokenCounter(TokenCounter):
    """Counts the tokens of a conversation's prompt, also with the tools of MCP servers."""

    async def _complete(self, body: MessagesRequest) -> MessagesRequest:
        if not body.mcp_servers:
            return body
        tools = ServerTools(body, self._serving.config.frontend.mcp_servers)
        async with tools.session() as session:
            await tools.list_functions(session)
        return replace(
            body,
            messages=plain_messages(body.messages or ()),
            tools=tools.functions() or None,
            tool_choice=tools.choice(),
            mcp_servers=None,
        )


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
        self._tools = ServerTools(body, servers)
        # The message without its content, and the content.
        self._message: Json = {}
        self._content: list[Json] = []
        self._usage: Json = {}
        self._num_calls = 0

    async def run(self, write: Write) -> Json:
        """Return the finished message. Raise APIError 424 if a turn failed, or a server does not answer."""
        messages = plain_messages(self._body.messages or ())
        async with self._tools.session() as session:
            await self._tools.list_functions(session)
            number = 0
            while True:
                first = len(self._content)
                ending = await self._run_turn(messages, number, write)
                turn = self._content[first:]
                calls = [block for block in turn if block["type"] == USE]
                if ending["stop_reason"] == "tool_use" and calls:
                    results = await self._run_calls(session, calls, write)
                    messages += as_turns([*turn, *results])
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

    def _turn_body(self, messages: list[Json], *, is_first: bool) -> MessagesRequest:
        tools, choice = self._tools.functions(), self._tools.choice()
        if not is_first and choice is not None and choice.type in ("any", "tool"):
            # Else the model would have to call tools for ever.
            choice = replace(choice, type="auto")
        if self._num_calls >= MAX_CALLS:
            choice = ToolChoice(type="none")
        return replace(
            self._body,
            messages=messages,
            tools=tools or None,
            tool_choice=choice,
            max_tokens=self._num_tokens_left(),
            mcp_servers=None,
            stream=True,
        )

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
                        block = self._tools.shown_block(event["content_block"])
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
                        if self._content[-1]["type"] in ("tool_use", USE):
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
            block: Json = {"type": RESULT, "tool_use_id": use["id"], "is_error": error is not None}
            block["content"] = [text]
            index = len(self._content)
            self._content.append(block)
            blocks.append(block)
            await write(message_event("content_block_start", index=index, content_block=block))
            await write(message_event("content_block_stop", index=index))
        return blocks


def _moved(event: Json, by: int) -> bytes:
    fields = {name: value for name, value in event.items() if name != "type"}
    return message_event(event["type"], **fields | {"index": event["index"] + by})


async def _drop(events: bytes) -> None:
    """Drop the events of a message that is not streamed."""
