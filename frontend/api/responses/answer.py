"""Write answers of the Responses API, as a whole or as stream events."""

from __future__ import annotations

import time
from typing import Any, Final

from msgspec.structs import replace

from ...chat import ToolCallDelta
from ...client.engine_client import Delta, Sequence
from ...http.errors import APIError
from ...http.json_pieces import encode_whole
from ..chats.answer import ChatAnswer
from ..dialects.dialect import DialectChunks
from ..generation import raise_if_failed
from ..logprobs import Json
from ..receipts.timings import llama_prompt_timings, llama_timings
from ..serving import Serving
from ..streaming.event_stream import OPENAI_STREAM, ChunkEncoder, StreamFormat
from ..streaming.progress import ProgressChunks
from .client_tools import CLIENT_TOOLS
from .mcp.tools import MCP, SECRETS
from .namespaces import call_fields, is_left_out
from .output import OutputBuilder
from .request import (
    CACHE_OPTIONS,
    INCLUDE_LOGPROBS,
    INCLUDE_REASONING,
    RETENTIONS,
    Exchange,
    ResponseChat,
)

_ERROR_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""HTTP status -> error code of a failed response. Other statuses have "server_error"."""

TOKENS_OF_RECORDED_EVENTS: Final = 1
"""Number of tokens per event of a recorded response. It is fixed, so that a repeated run writes the same events."""


def describe_response(serving: Serving, exchange: Exchange, status: str) -> Json:
    """Return a response without output, which echoes the fields of the request."""
    body = exchange.body
    defaults = serving.config.frontend.default_sampling
    reasoning, text = body.reasoning or {}, body.text or {}

    def effective(name: str) -> float:
        given = getattr(body, name)
        return float(defaults.get(name, 1.0) if given is None else given)

    response: Json = {
        "id": exchange.response_id,
        "object": "response",
        "created_at": exchange.created_at,
        "status": status,
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": serving.answering_model(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_options": _shown_cache_options(body.prompt_cache_options),
        "prompt_cache_retention": RETENTIONS.get(body.prompt_cache_retention or ""),
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary") or reasoning.get("generate_summary"),
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": effective("temperature"),
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or () if not is_left_out(tool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": effective("top_p"),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
    if body.conversation is not None:
        given = body.conversation
        response["conversation"] = {"id": given if isinstance(given, str) else given["id"]}
    return response


def _shown_cache_options(given: Json | None) -> Json | None:
    """Return the options as OpenAI shows them: the default of an option is its first choice."""
    if given is None:
        return None
    shown: Json = {name: given.get(name) or choices[0] for name, choices in CACHE_OPTIONS.items()}
    return shown | {"comparison_response_id": None}


def _shown_tool(tool: Json) -> Json:
    if tool.get("type") == MCP:
        return {name: value for name, value in tool.items() if name not in SECRETS}
    if tool.get("type") == "function" and "function" not in tool:
        return {"parameters": None, "strict": None} | tool
    return tool


class ResponsesAnswer(ChatAnswer):
    """The answer to one request, in the format of the Responses API."""

    shows_abort = False

    request: ResponseChat

    @property
    def exchange(self) -> Exchange:
        """The request and its response, with the data that the answer needs."""
        exchange: Exchange = self.request.exchange
        return exchange

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        message = self.choices[0].read(output)
        builder = self.new_builder(lambda kind, **fields: None)
        builder.add(message, self.render_logprobs(output))
        return self.finish(builder, output)

    def without_output(self, outputs: list[Delta]) -> Json:
        """Return the response to a request that only prepares the next one. Raise APIError if the sequence failed."""
        raise_if_failed(outputs[0])
        response = self.describe("completed")
        counts = self.token_counts()
        nothing = {"output_tokens": 0, "total_tokens": counts["input_tokens"]}
        response["usage"] = counts | nothing | self.receipt()
        response["completed_at"] = int(time.time())
        return response | self.transfer()

    def chunks(self) -> ResponseChunks:
        """Return the encoder of a stream."""
        return ResponseChunks(self)

    def new_builder(self, emit: Any) -> OutputBuilder:
        """Return a builder of the output, which writes its events with `emit`."""
        exchange = self.exchange
        tools = exchange.body.tools
        fields, client_tools = call_fields(tools, [*exchange.context, *exchange.input])

        def kind_of(call: ToolCallDelta) -> str:
            if call.name in client_tools:
                return CLIENT_TOOLS[call.name].item
            is_custom = self.choices[0].calls.is_custom(call.index)
            return "custom_tool_call" if is_custom else "function_call"

        return OutputBuilder(
            exchange.response_id,
            emit,
            name_call=lambda call: fields.get(call.name or "", {"name": call.name}),
            kind_of=kind_of,
            summarizes=exchange.summarizes_reasoning,
            encrypts=exchange.includes(INCLUDE_REASONING),
        )

    def render_logprobs(self, delta: Delta) -> list[Json]:
        """Return the logprobs of the tokens of a delta; [] unless the request includes them."""
        if delta.logprobs is None or not self.exchange.includes(INCLUDE_LOGPROBS):
            return []
        return self.renderer.chat_entries(delta.logprobs)

    def finish(self, builder: OutputBuilder, delta: Delta) -> Json:
        """Close the last item and return the final response."""
        is_cut = delta.finish_reason == "length"
        builder.close(is_cut=is_cut)
        response = self.describe("incomplete" if is_cut else "completed")
        response["output"] = builder.items
        response["usage"] = self.token_counts() | self.receipt()
        response |= self.timing() | self.transfer() | self._raw_messages()
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return response

    def _raw_messages(self) -> Json:
        """Return vLLM's `input_messages` and `output_messages`, if the request asks for them; else {}."""
        if not self.exchange.body.enable_response_messages:
            return {}
        [sequence] = self._group.sequences
        written = list(sequence.token_ids)[: sequence.num_read_tokens]
        prompt = self.prompt.token_ids.tolist()
        found: Json = {}
        for name, token_ids in (("input_messages", prompt), ("output_messages", written)):
            text = self.serving.tokenizer.decode(token_ids)
            message = {"type": "raw_message_tokens", "message": text, "tokens": token_ids}
            found[name] = [message]
        return found

    def describe(self, status: str) -> Json:
        """Return the response without its output, with this status."""
        return describe_response(self.serving, self.exchange, status)

    def timings(self) -> Json:
        """Return llama.cpp's `timings` so far, if the request asks for them; else {}."""
        [sequence] = self._group.sequences
        if not self.request.timings_per_token:
            return {}
        return {"timings": llama_timings(sequence, sequence.num_read_tokens)}

    def token_counts(self) -> Json:
        """Return the usage so far."""
        [sequence] = self._group.sequences
        return {
            "input_tokens": sequence.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": sequence.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": sequence.num_read_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self.choices[0].num_reasoning_tokens or 0
            },
            "total_tokens": sequence.num_prompt_tokens + sequence.num_read_tokens,
        }


def describe_failure(error: APIError) -> Json:
    """Return the `error` of a failed response."""
    return {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}


def encode_error_event(error: APIError) -> bytes:
    """Return the event for an error that occurred before the response existed."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    content = {"type": "error", "sequence_number": 0, **fields}
    return b"event: error\ndata: %b\n\n" % encode_whole(content)


RESPONSE_STREAM: Final = replace(
    OPENAI_STREAM, done=b"", encode_error=encode_error_event, has_ids=False
)
"""The stream format of a response."""


class EventWriter:
    """Writes events with consecutive sequence numbers, which start at 0 or after the earlier events."""

    def __init__(self, num_before: int = 0) -> None:
        self._events: list[bytes] = []
        self._num_events = num_before

    def emit(self, kind: str, **fields: object) -> None:
        """Write an event of type `kind`."""
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_whole(content)))

    def take(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return b"".join(events)


class ResponseChunks(DialectChunks[ResponsesAnswer]):
    """Writes the events of a response: its start, its items one after another, and its end.

    `final` is the final response; None before the end.
    """

    def __init__(self, answer: ResponsesAnswer) -> None:
        super().__init__(answer)
        self._writer = EventWriter()
        self._builder = answer.new_builder(self._emit)
        self._has_begun = False
        self._is_background = bool(answer.exchange.body.background)
        if self._is_background or answer.exchange.is_recorded:
            self._max_tokens = TOKENS_OF_RECORDED_EVENTS
        self.final: Json | None = None

    @property
    def format(self) -> StreamFormat:
        """The format of the stream. An error is written as one more event."""
        return replace(RESPONSE_STREAM, encode_error=self._encode_error)

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output."""
        delta = self.read(sequence)
        if not self._has_begun:
            self._begin()
        self._builder.add(self.choice.read(delta), self.answer.render_logprobs(delta))
        if delta.finish_reason is not None:
            self.final = self.answer.finish(self._builder, delta)
        return self._writer.take()

    def closing(self) -> bytes:
        """Return the event that ends the response."""
        assert self.final is not None
        timings = self.answer.timings()
        self._writer.emit(f"response.{self.final['status']}", response=self.final, **timings)
        return self._writer.take()

    def with_progress(self) -> ChunkEncoder:
        """Return this encoder, with the progress of the prompt if the request asks for it."""
        wanted = self.answer.request.return_progress
        return ProgressChunks(self, self._progress) if wanted else self

    def _progress(self, sequence: Sequence, progress: Json) -> bytes:
        if not self._has_begun:
            self._begin()
        more: Json = {"prompt_progress": progress}
        if self.answer.request.timings_per_token:
            more["timings"] = llama_prompt_timings(progress)
        response = self.answer.describe("in_progress")
        self._writer.emit("response.in_progress", response=response, **more)
        return self._writer.take()

    def _emit(self, kind: str, **fields: object) -> None:
        if kind == "response.output_text.delta":
            fields |= self.answer.timings()
        self._writer.emit(kind, **fields)

    def _begin(self) -> None:
        self._has_begun = True
        if self._is_background:
            queued = self.answer.describe("queued")
            self._writer.emit("response.created", response=queued)
            self._writer.emit("response.queued", response=queued)
        else:
            self._writer.emit("response.created", response=self.answer.describe("in_progress"))
        self._writer.emit("response.in_progress", response=self.answer.describe("in_progress"))

    def _encode_error(self, error: APIError) -> bytes:
        if not self._has_begun:
            self._begin()
        self._builder.close(is_cut=True)
        self.final = self.answer.describe("failed")
        self.final |= {"error": describe_failure(error), "output": self._builder.items}
        self._writer.emit("response.failed", response=self.final)
        return self._writer.take()
