"""Write answers in the format of Ollama's API."""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import UTC, datetime
from typing import Final

from ...chat import ToolCallDelta
from ...client.engine_client import Delta, Sequence
from ...http.errors import APIError
from ...http.json_pieces import encode_whole
from ..chats.answer import ChatAnswer
from ..logprobs import Json
from ..streaming.event_stream import StreamFormat
from .dialect import CallCollector, DialectChunks, decode_input


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error in Ollama's format."""
    return {"error": error.message}


def _line(content: object) -> bytes:
    return encode_whole(content) + b"\n"


OLLAMA_STREAM: Final = StreamFormat(
    content_type=b"application/x-ndjson",
    # Ollama's clients decode every line as an object.
    keep_alive=b"",
    done=b"",
    encode_error=lambda error: _line(error_body(error, "")),
)


def answer_without_prompt(path: str, model: str, done_reason: str) -> Json:
    """Return the answer to a request that only loads or unloads a model.

    Args:
        path: `/api/chat` or `/api/generate`.
        model: The name in the request.
        done_reason: "load" or "unload".
    """
    is_chat = path == "/api/chat"
    empty: Json = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return head_of(model) | empty | {"done": True, "done_reason": done_reason}


def head_of(model: str) -> Json:
    """Return the fields that every answer begins with."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": model, "created_at": now.replace("+00:00", "Z")}


class _OllamaAnswer(ChatAnswer):
    """An answer in Ollama's format. Answers to chats and to prompts differ in one field."""

    shows_abort = False

    @abstractmethod
    def fields(self, content: str, thinking: str, calls: list[ToolCallDelta]) -> Json:
        """Return the fields that hold a part of the answer: its text, its reasoning and its tool calls."""

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        message = self.choices[0].read(output)
        calls = CallCollector().add(message.tool_calls, is_end=True)
        return (
            self.head()
            | self.fields(message.content, message.reasoning, calls)
            | self.logprobs(output)
            | self.ending(output)
        )

    def chunks(self) -> OllamaChunks:
        """Return the encoder of a stream."""
        return OllamaChunks(self)

    def head(self) -> Json:
        """Return the fields that every line has."""
        return head_of(self.request.model or str(self.envelope["model"]))

    def logprobs(self, delta: Delta) -> Json:
        """Return the log-probabilities of new tokens, if they were requested."""
        if not self.request.logprobs or delta.logprobs is None:
            return {}
        return {"logprobs": self.renderer.chat(delta.logprobs)["content"]}

    def ending(self, delta: Delta) -> Json:
        """Return the fields of the last line. Durations are in nanoseconds."""
        [sequence] = self._group.sequences
        end = sequence.last_token_time or time.monotonic()
        begin = sequence.scheduled_time or sequence.arrival_time
        first = sequence.first_token_time or end
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(end - sequence.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": sequence.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - begin),
            "eval_count": sequence.num_read_tokens,
            "eval_duration": nanoseconds(end - first),
        }


class OllamaChatAnswer(_OllamaAnswer):
    """The answer to one conversation."""

    def fields(self, content: str, thinking: str, calls: list[ToolCallDelta]) -> Json:
        """Return the field `message` with a part of the answer."""
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}


def _call(call: ToolCallDelta) -> Json:
    arguments = decode_input(call.arguments)
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return {"id": call.id, "function": function}


class OllamaTextAnswer(_OllamaAnswer):
    """The answer to one prompt."""

    def fields(self, content: str, thinking: str, calls: list[ToolCallDelta]) -> Json:
        """Return the field `response` with a part of the answer."""
        return {"response": content} | ({"thinking": thinking} if thinking else {})


class OllamaChunks(DialectChunks[_OllamaAnswer]):
    """Writes the lines of an answer."""

    format = OLLAMA_STREAM

    def __init__(self, answer: _OllamaAnswer) -> None:
        super().__init__(answer)
        self._calls = CallCollector()

    def encode(self, sequence: Sequence) -> bytes:
        """Return the lines for the new output."""
        delta = self.read(sequence)
        answer, message = self.answer, self.choice.read(delta)
        is_end = delta.finish_reason is not None
        calls = self._calls.add(message.tool_calls, is_end=is_end)
        logprobs = answer.logprobs(delta)
        lines = b""
        if message.content or message.reasoning or calls or logprobs:
            fields = answer.fields(message.content, message.reasoning, calls)
            lines = _line(answer.head() | fields | logprobs | {"done": False})
        if is_end:
            lines += _line(answer.head() | answer.fields("", "", []) | answer.ending(delta))
        return lines


def nanoseconds(seconds: float) -> int:
    """Return a duration in seconds as an integer number of nanoseconds."""
    return max(0, round(seconds * 1e9))
