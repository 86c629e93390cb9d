"""`POST /v2/chat`: Cohere's Chat API."""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

from ....chat import MessageDelta, ToolCallDelta
from ....client.engine_client import Delta
from ....http.errors import APIError, expect
from ....http.json_pieces import encode_whole
from ....http.routing import Asgi
from ...bodies.request_memory import MemoryLease
from ...chats.answer import ChatAnswer
from ...logprobs import Json
from ...routes.chat_completions import ChatCompletions
from ...schema import ChatCompletionRequest
from ...schema.cohere import CohereChatRequest
from ...streaming.event_stream import StreamFormat, event
from ..dialect import BlockChunks, CallCollector
from .chat_request import CohereChat, translate_chat

PATHS: Final = ("/v2/chat", "/cohere/v2/chat")


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error in Cohere's format."""
    return {"id": request_id, "message": error.message}


class CohereAnswer(ChatAnswer):
    """The answer to one conversation, in Cohere's format."""

    shows_abort = False

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        found = self.choices[0].read(output)
        blocks: list[Json] = []
        if found.reasoning:
            blocks.append({"type": "thinking", "thinking": found.reasoning})
        calls = [_call(call) for call in CallCollector().add(found.tool_calls, is_end=True)]
        if found.content or not calls:
            blocks.append({"type": "text", "text": found.content})
        message: Json = {"role": "assistant"}
        if blocks:
            message["content"] = blocks
        if calls:
            message["tool_calls"] = calls
        answer = {"id": self.envelope["id"], "message": message} | self.ending(output)
        if (logprobs := self.logprobs(output)) is not None:
            answer["logprobs"] = [logprobs]
        return answer

    def chunks(self) -> CohereChunks:
        """Return the encoder of a stream."""
        return CohereChunks(self)

    def ending(self, delta: Delta) -> Json:
        """Return the fields of the end: the reason, and the numbers of tokens."""
        reason = "COMPLETE"
        if isinstance(delta.stop_reason, str):
            reason = "STOP_SEQUENCE"
        elif delta.finish_reason == "length":
            reason = "MAX_TOKENS"
        elif self.choices[0].called_tools:
            reason = "TOOL_CALL"
        [sequence] = self._group.sequences
        counts = {
            "input_tokens": sequence.num_prompt_tokens,
            "output_tokens": sequence.num_read_tokens,
        }
        usage: Json = {"billed_units": counts, "tokens": counts}
        usage["cached_tokens"] = sequence.num_cached_tokens
        return {"finish_reason": reason, "usage": usage}

    def logprobs(self, delta: Delta) -> Json | None:
        """Return the log-probabilities of new tokens; None if they were not requested."""
        if not self.request.logprobs or delta.logprobs is None:
            return None
        rendered = self.renderer.chat_entries(delta.logprobs)
        return {
            "text": "".join(each["token"] for each in rendered),
            "token_ids": list(delta.token_ids),
            "logprobs": [each["logprob"] for each in rendered],
        }


def _call(call: ToolCallDelta) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reads_lines(scope: Scope) -> bool:
    """Return whether the client accepts JSON, and nothing that includes server-sent events."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    kinds = [kind.partition(b";")[0].strip() for kind in accepted.split(b",")]
    return b"application/json" in kinds and not {b"*/*", b"text/*", _EVENTS} & set(kinds)


def _line(content: object) -> bytes:
    return encode_whole(content) + b"\n"


def _error(error: APIError) -> Json:
    """Return the end of a stream. The clients have no event for errors; they read the reason there."""
    delta = {"finish_reason": "ERROR", "error": error.message}
    return {"type": "message-end", "delta": delta}


_EVENTS: Final = b"text/event-stream"

_STREAM: Final = StreamFormat(
    content_type=_EVENTS + b"; charset=utf-8",
    keep_alive=b": keep-alive\n\n",
    done=b"data: [DONE]\n\n",
    encode_error=lambda error: event(_error(error)),
)
_LINES: Final = StreamFormat(
    content_type=b"application/stream+json",
    # Clients decode every line as an object.
    keep_alive=b"",
    done=b"",
    encode_error=lambda error: _line(_error(error)),
)


class CohereChunks(BlockChunks[CohereAnswer]):
    """Writes the events of a message. A block or a call ends when another one starts."""

    def __init__(self, answer: CohereAnswer) -> None:
        super().__init__(answer)
        request = answer.request
        self._writes_lines = isinstance(request, CohereChat) and request.reads_lines
        self._encode = _line if self._writes_lines else event
        self._num_blocks = 0

    @property
    def format(self) -> StreamFormat:
        """The format around the events."""
        return _LINES if self._writes_lines else _STREAM

    def _event(self, kind: str, **fields: object) -> bytes:
        return self._encode({"type": kind, **fields})

    def _message_event(self, kind: str, index: int, **fields: object) -> bytes:
        return self._event(kind, index=index, delta={"message": fields})

    def _begin(self, events: list[bytes]) -> None:
        empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
        start = {"message": empty | {"citations": []}}
        events.append(self._event("message-start", id=self.answer.envelope["id"], delta=start))

    def _end(self, delta: Delta, events: list[bytes]) -> None:
        answer_id = self.answer.envelope["id"]
        events.append(self._event("message-end", id=answer_id, delta=self.answer.ending(delta)))

    def _write(self, message: MessageDelta, delta: Delta, events: list[bytes]) -> None:
        logprobs = self.answer.logprobs(delta)
        for kind, text in (("thinking", message.reasoning), ("text", message.content)):
            if text:
                self._enter_block(kind, events)
                fields: Json = {"index": self._open[1]}
                fields["delta"] = {"message": {"content": {kind: text}}}
                if logprobs is not None:
                    fields["logprobs"] = logprobs
                events.append(self._event("content-delta", **fields))
        for call in message.tool_calls:
            if self._open != ("tool-call", call.index):
                self._close(events)
                self._open = ("tool-call", call.index)
                events.append(
                    self._message_event("tool-call-start", call.index, tool_calls=_call(call))
                )
            elif call.arguments:
                piece = {"function": {"arguments": call.arguments}}
                events.append(self._message_event("tool-call-delta", call.index, tool_calls=piece))

    def _enter_block(self, kind: str, events: list[bytes]) -> None:
        """Open a block of this type, unless it is already open."""
        if self._open[0] == kind:
            return
        self._close(events)
        self._open = (kind, self._num_blocks)
        self._num_blocks += 1
        block = {"type": kind, kind: ""}
        events.append(self._message_event("content-start", self._open[1], content=block))

    def _close(self, events: list[bytes]) -> None:
        kind, index = self._open
        self._open = ("", 0)
        if kind == "tool-call":
            events.append(self._event("tool-call-end", index=index))
        elif kind:
            events.append(self._event("content-end", index=index))


class CohereChats(ChatCompletions):
    """The route for chats."""

    body_schema = CohereChatRequest
    cuts_max_tokens = True
    answer_type = CohereAnswer

    async def _receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[ChatCompletionRequest, int]:
        request, size = await super()._receive(asgi, lease)
        assert isinstance(request, CohereChat)
        request.reads_lines = _reads_lines(asgi.scope)
        return request, size

    async def _translate(self, body: CohereChatRequest, size: int) -> ChatCompletionRequest:
        serving = self._serving

        def shows_documents() -> bool:
            return "documents" in serving.chat_template(bool(body.tools)).source

        request = await serving.executor.run(size, translate_chat, body, shows_documents)
        limit = (body.thinking or {}).get("token_budget")
        if limit is not None and serving.formats.can_limit_reasoning:
            expect(limit, int, "thinking.token_budget", "an integer")
            request.thinking_token_budget = limit
        return request
