"""Translate requests of the Responses API to chat completion requests."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.datastructures import QueryParams

from ...http.errors import APIError, bad_request, expect, renamer, verify_choice, wrong
from ..generation import MAX_USER_CHARACTERS
from ..logprobs import Json
from ..schema import AgentChat, ChatCompletionRequest
from ..schema.responses import (
    SHARED_FIELDS,
    ResponseCreateRequest,
    ResponseFields,
    ResponsesRequest,
)
from ..stored.metadata import verify_metadata
from .client_tools import CLIENT_TOOLS
from .items import Files, MessageBuilder
from .namespaces import TOOL_KINDS, choose_full_name, place_tools

INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"
INCLUDE_REASONING: Final = "reasoning.encrypted_content"
_INCLUDABLE: Final = (
    INCLUDE_LOGPROBS,
    INCLUDE_REASONING,
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
MAX_TOP_LOGPROBS: Final = 20

RETENTIONS: Final = {"in_memory": "in_memory", "in-memory": "in_memory", "24h": "24h"}
"""`prompt_cache_retention` in a request -> its value in the response. It has no effect."""

CACHE_OPTIONS: Final = {"mode": ("implicit", "explicit"), "ttl": ("30m", "12h")}
"""The values of each of `prompt_cache_options`, the default first. They have no effect.

`prewarm` is not among them: a response repeats the others.
"""

_rename: Final = renamer(
    {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "truncate_prompt_tokens": "truncation",
    }
)
_MESSAGES: Final = re.compile(r"messages\b(?:\[(\d+)\]\.content(?=\[))?")


@dataclass(slots=True)
class Exchange:
    """A request of the Responses API, with the data that its answer needs in addition to the chat.

    Attributes:
        body: The body of the request.
        response_id: The identifier of the response.
        created_at: The time at which the response was created, in seconds since 1970.
        input: The items of the request itself.
        context: The items before `input`, from earlier responses or from the conversation.
        owner: The tenant that may read the response.
        files: The stored files that the items refer to.
        kept: The responses that the client's WebSocket keeps; None for a client without one.
        places: The fields of `input` that are contents of messages of the chat, by the number of the message.
        is_recorded: True if another frontend must be able to write the same events.
    """

    body: ResponsesRequest
    response_id: str
    created_at: int
    input: list[Json]
    context: list[Json] = field(default_factory=list)
    owner: str = ""
    files: Files = field(default_factory=dict)
    kept: Any = None
    places: dict[int, str] = field(default_factory=dict)
    is_recorded: bool = False

    @property
    def only_prepares(self) -> bool:
        """True if the client wants no output yet: only its prompt is computed, so that the next response is fast."""
        if (self.body.prompt_cache_options or {}).get("prewarm") is True:
            return True
        return isinstance(self.body, ResponseCreateRequest) and self.body.generate is False

    @property
    def summarizes_reasoning(self) -> bool:
        """True if the text of reasoning is the summary of its item instead of the content."""
        reasoning = self.body.reasoning or {}
        return bool(reasoning.get("summary") or reasoning.get("generate_summary"))

    def includes(self, name: str) -> bool:
        """Return whether the client asked for an optional part of the output (`include`)."""
        return name in (self.body.include or ())


class ResponseChat(AgentChat, kw_only=True):
    """The chat completion request of a response. `run` is its background run; None if its client waits for it."""

    exchange: Any = None
    run: Any = None


def translate_response(exchange: Exchange) -> ResponseChat:
    """Return the exchange translated to a chat completion request.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    body = exchange.body
    _verify(body)
    logprobs = exchange.includes(INCLUDE_LOGPROBS)
    shared = {name: getattr(body, name) for name in SHARED_FIELDS}
    max_tokens = body.max_output_tokens
    if exchange.only_prepares:
        max_tokens, shared["min_tokens"] = 1, None
    return ResponseChat(
        **_prompt_fields(body, exchange.context, exchange.input, exchange.files, exchange.places),
        **shared,
        stream=body.stream,
        max_tokens=max_tokens,
        user=body.user or body.safety_identifier,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        exchange=exchange,
    )


def translate_prompt(
    body: ResponseFields,
    context: list[Json],
    items: list[Json],
    files: Files,
    places: dict[int, str],
) -> ChatCompletionRequest:
    """Return a chat completion request with the prompt of a response. `places` receives what `sent_name` needs.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    return AgentChat(**_prompt_fields(body, context, items, files, places))


def _verify_cache_fields(body: ResponseFields) -> None:
    options = body.prompt_cache_options or {}
    for name, choices in CACHE_OPTIONS.items():
        verify_choice(f"prompt_cache_options.{name}", options.get(name), choices)
    verify_choice("prompt_cache_retention", body.prompt_cache_retention, RETENTIONS)
    if options.get("prewarm") is not None:
        expect(options["prewarm"], bool, "prompt_cache_options.prewarm", "a boolean")


def _prompt_fields(
    body: ResponseFields,
    context: list[Json],
    items: list[Json],
    files: Files,
    places: dict[int, str],
) -> Json:
    if not items and not context and not body.instructions:
        raise bad_request("input", "is required and must not be empty")
    if body.truncation not in (None, "auto", "disabled"):
        raise wrong("truncation", '"auto" or "disabled"', body.truncation)
    _verify_cache_fields(body)
    builder = MessageBuilder(files)
    if body.instructions:
        builder.messages.append({"role": "system", "content": body.instructions})
    builder.add_items(context, "input")
    builder.places = places
    builder.add_items(items, "input")
    text, reasoning = body.text or {}, body.reasoning or {}
    effort, verbosity = reasoning.get("effort"), text.get("verbosity")
    if effort is not None:
        expect(effort, str, "reasoning.effort", "a string")
    if verbosity is not None:
        expect(verbosity, str, "text.verbosity", '"low", "medium" or "high"')
    placed = place_tools(body.tools, [*context, *items])
    tools = [each.tool for each in placed]
    choice = choose_full_name(_tool_choice(body.tool_choice, has_tools=bool(tools)))
    return {
        "model": body.model,
        "messages": builder.messages,
        "continue_final_message": _is_partial(items) or None,
        "tools": tools or None,
        "loaded_tools": frozenset(each.model_name for each in placed if each.is_in_output),
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        # The format applies to text, and there is no text if a call is forced.
        "response_format": None if _forces_call(choice) else _response_format(text.get("format")),
        "verbosity": verbosity,
        "reasoning_effort": effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "media_io_kwargs": body.media_io_kwargs,
        "use_audio_in_video": body.use_audio_in_video,
    }


def _is_partial(items: list[Json]) -> bool:
    """Return whether the last item is a text that the model has begun, which the answer then continues."""
    if not items or items[-1].get("status") not in ("in_progress", "incomplete"):
        return False
    last = items[-1]
    if last["type"] != "message" or last.get("role") != "assistant":
        return False
    return any(part.get("text") for part in last["content"][-1:])


def verify_include(query: QueryParams) -> None:
    """Raise APIError (400) if a query asks for a part of the output that does not exist."""
    for name in ("include", "include[]"):
        for value in query.getlist(name):
            _verify_includable(name, value)


def _verify_includable(where: str, name: str) -> None:
    if name not in _INCLUDABLE:
        raise wrong(where, f"one of {', '.join(_INCLUDABLE)}", name)


def _verify(body: ResponsesRequest) -> None:
    identifier = body.safety_identifier or ""
    if len(identifier) > MAX_USER_CHARACTERS:
        raise bad_request(
            "safety_identifier",
            f"must have at most {MAX_USER_CHARACTERS} characters, got {len(identifier)}",
        )
    for i, name in enumerate(body.include or ()):
        _verify_includable(f"include[{i}]", name)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise wrong("top_logprobs", f"between 0 and {MAX_TOP_LOGPROBS}", body.top_logprobs)
    for name, low in (("max_output_tokens", 1), ("max_tool_calls", 0)):
        value = getattr(body, name)
        if value is not None and value < low:
            raise wrong(name, f"at least {low}", value)
    if body.stream_options and not body.stream:
        raise bad_request("stream_options", "is only allowed with stream=true")
    form = (body.text or {}).get("format")
    if body.structured_outputs and isinstance(form, dict) and form.get("type") != "text":
        raise bad_request("structured_outputs", "cannot be combined with text.format")
    compression = (body.image or {}).get("context_compression")
    if compression not in (None, "auto", "disabled"):
        expected = '"auto" or "disabled", because this server does not compress images'
        raise wrong("image.context_compression", expected, compression)
    if body.background and body.store is False:
        raise bad_request("background", "can only be used when `store` is true")
    verify_metadata(body.metadata)


def verify_message(body: ResponseCreateRequest) -> None:
    """Verify the fields of an event of a WebSocket that a request has not. Its answer is always streamed.

    Raises:
        APIError: A field is not supported (400).
    """
    if body.background:
        raise bad_request("background", "is not supported on a WebSocket; send POST /v1/responses")
    if body.stream_id is not None:
        raise bad_request(
            "stream_id",
            "is not supported: a WebSocket has one response at a time; open another one",
        )
    body.stream = True


def _tool_choice(choice: str | Json | None, *, has_tools: bool) -> str | Json | None:
    if isinstance(choice, dict):
        kinds = (*TOOL_KINDS, "allowed_tools", *CLIENT_TOOLS)
        if choice.get("type") not in kinds:
            expected = f"one of {', '.join(kinds)}, because this server runs no tools itself"
            raise wrong("tool_choice.type", expected, choice.get("type"))
    elif choice == "auto" and not has_tools:
        # Clients send this default value with every request.
        return None
    return choice


def _forces_call(choice: str | Json | None) -> bool:
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        return choice.get("mode") == "required"
    return isinstance(choice, dict) or choice == "required"


def _response_format(form: Any) -> Json | None:
    if form is None:
        return None
    where = "text.format"
    kind = expect(form, dict, where, "an object").get("type")
    if kind == "json_schema":
        if isinstance(form.get("json_schema"), dict):
            return {"type": kind, "json_schema": form["json_schema"]}
        return {"type": kind, "json_schema": {k: v for k, v in form.items() if k != "type"}}
    if kind not in ("text", "json_object"):
        raise wrong(f"{where}.type", '"text", "json_object" or "json_schema"', kind)
    return {"type": kind}


def sent_name(body: ResponseFields, places: dict[int, str], name: str) -> str:
    """Return the name of a field here for its name in the chat completion request, for error messages.

    `places` are the fields that became contents of messages, by the number of the message.
    """
    if name.startswith("tools["):
        return _rename_tool(name, body)
    if (found := _MESSAGES.match(name)) is None:
        return _rename(name)
    place = places.get(int(found[1])) if found[1] else None
    if place is None or isinstance(body.input, str):
        return "input"
    # The Responses API has these fields without the inner object.
    rest = name[found.end() :].replace(".image_url.url", ".image_url")
    return place + rest.replace(".file.file_data", ".file_data")


def _rename_tool(param: str, body: ResponseFields) -> str:
    """Return the path of a tool in the body, for its path in the chat completion request."""
    number, _, rest = param.removeprefix("tools[").partition("]")
    with contextlib.suppress(APIError, ValueError):
        all_placed = place_tools(body.tools)
        if int(number) >= len(all_placed):
            # An item loads this tool.
            return "input"
        placed = all_placed[int(number)]
        return placed.where + rest.removeprefix(f".{placed.tool['type']}")
    return param


def conversation_id(body: ResponseFields) -> str | None:
    """Return the identifier of the conversation that a response belongs to; None if there is none.

    Raises:
        APIError: The field is malformed, or combined with `previous_response_id` (400).
    """
    if body.conversation is None:
        return None
    if body.previous_response_id is not None:
        raise bad_request("previous_response_id", "cannot be combined with conversation")
    given = body.conversation
    found = given if isinstance(given, str) else given.get("id")
    if not isinstance(found, str):
        raise wrong("conversation", "an id or an object with one", given)
    return found
