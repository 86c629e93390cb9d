"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....chat import MessageDelta
from ....client.engine_client import Delta
from ....http.errors import APIError, bad_request, json_response, renaming
from ....http.json_pieces import encode_whole
from ...bodies.intake import RouteHandlers
from ...chats.answer import ChatAnswer
from ...logprobs import Json
from ...openapi import accepts
from ...prompts import ContextExceededError
from ...routes.chat_completions import ChatCompletions, render_request
from ...schema import ChatCompletionRequest
from ...schema.anthropic import MessagesRequest
from ...streaming.event_stream import StreamFormat
from ..dialect import BlockChunks, CallCollector, decode_input
from .request import MessagesPrompt, translate_messages

PATH: Final = "/v1/messages"

_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> Anthropic's error type. Other statuses from 500 on are "api_error"."""


_ID_PREFIX: Final = "msg_"
_RECORDED_PREFIX: Final = "chatcmpl-"


def recorded_id(shown_id: str) -> str:
    """Return the ID under which the message with this ID is recorded."""
    if not shown_id.startswith(_ID_PREFIX):
        return shown_id
    return _RECORDED_PREFIX + shown_id.removeprefix(_ID_PREFIX)


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error in Anthropic's format."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    message = error.message
    if isinstance(error, ContextExceededError) and error.num_tokens:
        # Claude Code reads from it how much it must shorten the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    shown: Json = {"type": kind, "message": message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    body: Json = {"type": "error", "error": shown}
    return body | {"request_id": request_id} if request_id else body


class TokenCounter(RouteHandlers):
    """Counts the tokens of a conversation's prompt."""

    @accepts(MessagesRequest)
    async def count(self, http: Request) -> Response:
        """Return the number of tokens of the prompt."""
        serving = self._serving
        with self._intake.lease() as lease:
            body, size = await self._intake.receive(http, MessagesRequest, lease)
            body = await self._complete(body)
            request = await serving.executor.run(size, lambda: translate_messages(body))
            serving.verify_model(request.model)
            serving.verify_tokenizer("messages")
            with renaming(request.sent_name):
                chat = await render_request(serving, request, size)
            return json_response({"input_tokens": len(chat.token_ids)})

    async def _complete(self, body: MessagesRequest) -> MessagesRequest:
        return body


class MessagesAnswer(ChatAnswer):
    """The answer to one conversation, in Anthropic's format."""

    shows_abort = False

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        if isinstance(self.request, MessagesPrompt) and self.request.only_computes_prompt:
            counts = self.token_counts() | {"output_tokens": 0}
            ending = {"stop_reason": "max_tokens", "usage": counts}
            return self.message([]) | ending | self.transfer()
        message = self.choices[0].read(output)
        blocks: list[Json] = []
        for kind, text in (("thinking", message.reasoning), ("text", message.content)):
            if text:
                blocks.append(_block(kind) | {kind: text})
        for call in CallCollector().add(message.tool_calls, is_end=True):
            found = {"id": call.id, "name": call.name, "input": decode_input(call.arguments)}
            blocks.append(_block("tool_use") | found)
        usage = {"usage": self.token_counts()}
        return self.message(blocks) | self.ending(output) | usage | self.transfer()

    def chunks(self) -> MessageChunks:
        """Return the encoder of a stream."""
        return MessageChunks(self)

    def message(self, blocks: list[Json]) -> Json:
        """Return a message with these content blocks and the fields that it has before it ends."""
        return {
            "id": _ID_PREFIX + self.envelope["id"].removeprefix(_RECORDED_PREFIX),
            "type": "message",
            "role": "assistant",
            "model": self.envelope["model"],
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.token_counts(),
        }

    def ending(self, delta: Delta) -> Json:
        """Return the fields that describe why the message ended."""
        reason, stop = "end_turn", None
        if isinstance(delta.stop_reason, str):
            reason, stop = "stop_sequence", delta.stop_reason
        elif delta.finish_reason == "length":
            [sequence] = self._group.sequences
            is_as_long_as_asked = sequence.num_read_tokens >= (self.request.max_tokens or 0)
            num_tokens = sequence.num_prompt_tokens + sequence.num_read_tokens
            is_full = num_tokens >= self.serving.config.model.max_model_len
            is_cut = is_full and not is_as_long_as_asked
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif self.choices[0].called_tools:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def token_counts(self) -> Json:
        """Return the usage so far. In this API, input tokens do not include cached tokens."""
        [sequence] = self._group.sequences
        cached = sequence.num_cached_tokens
        counts: Json = {
            "input_tokens": sequence.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sequence.num_read_tokens,
        }
        if (num_thinking := self.choices[0].num_reasoning_tokens) is not None:
            counts["output_tokens_details"] = {"thinking_tokens": num_thinking}
        return counts


def _block(kind: str) -> Json:
    match kind:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case _:
            return {"type": "tool_use", "id": "", "name": "", "input": {}}


def message_event(kind: str, **fields: object) -> bytes:
    """Return an event of a stream."""
    content = encode_whole({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), content)


MESSAGES_STREAM: Final = StreamFormat(
    content_type=b"text/event-stream; charset=utf-8",
    keep_alive=message_event("ping"),
    done=b"",
    encode_error=lambda error: b"event: error\ndata: %b\n\n" % encode_whole(error_body(error, "")),
    has_ids=True,
)


class MessageChunks(BlockChunks[MessagesAnswer]):
    """Writes the events of a message. A block ends when another one starts."""

    format = MESSAGES_STREAM

    def __init__(self, answer: MessagesAnswer) -> None:
        super().__init__(answer)
        self._num_blocks = 0

    def _begin(self, events: list[bytes]) -> None:
        events.append(message_event("message_start", message=self.answer.message([])))

    def _end(self, delta: Delta, events: list[bytes]) -> None:
        answer = self.answer
        ending, usage = answer.ending(delta), answer.token_counts()
        events.append(
            message_event("message_delta", delta=ending, usage=usage, **answer.transfer())
        )
        events.append(message_event("message_stop"))

    def _write(self, message: MessageDelta, delta: Delta, events: list[bytes]) -> None:
        if message.reasoning:
            self._enter(("thinking", 0), _block("thinking"), events)
            self._add({"type": "thinking_delta", "thinking": message.reasoning}, events)
        if message.content:
            self._enter(("text", 0), _block("text"), events)
            self._add({"type": "text_delta", "text": message.content}, events)
        for call in message.tool_calls:
            block = _block("tool_use") | {"id": call.id, "name": call.name}
            self._enter(("tool_use", call.index), block, events)
            if call.arguments:
                self._add({"type": "input_json_delta", "partial_json": call.arguments}, events)

    def _enter(self, wanted: tuple[str, int], block: Json, events: list[bytes]) -> None:
        """Open a block of this type, unless it is already open. Any other open block is closed."""
        if self._open == wanted:
            return
        self._close(events)
        self._open = wanted
        events.append(
            message_event("content_block_start", index=self._num_blocks, content_block=block)
        )

    def _add(self, delta: Json, events: list[bytes]) -> None:
        events.append(message_event("content_block_delta", index=self._num_blocks, delta=delta))

    def _close(self, events: list[bytes]) -> None:
        if not self._open[0]:
            return
        if self._open[0] == "thinking":
            self._add({"type": "signature_delta", "signature": ""}, events)
        self._open = ("", 0)
        events.append(message_event("content_block_stop", index=self._num_blocks))
        self._num_blocks += 1


class Messages(ChatCompletions):
    """The route `/v1/messages` of Anthropic's API."""

    body_schema = MessagesRequest
    cuts_max_tokens = True
    answer_type = MessagesAnswer

    async def _translate(self, body: MessagesRequest, size: int) -> ChatCompletionRequest:
        return await self._serving.executor.run(size, self._translate_all, body)

    def _translate_all(self, body: MessagesRequest) -> ChatCompletionRequest:
        if body.max_tokens is None:
            raise bad_request("max_tokens", "is required")
        request = translate_messages(body)
        if body.thinking is not None and self._serving.formats.can_limit_reasoning:
            request.thinking_token_budget = body.thinking.budget_tokens
        return request
