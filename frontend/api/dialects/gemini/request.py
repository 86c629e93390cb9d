"""Translate requests of Google's Gemini API to chat completion requests.

The API is described at https://ai.google.dev/api/generate-content.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from ....http.errors import bad_request, expect, reject_deep_nesting, wrong
from ...bodies.conversion import read_part
from ...logprobs import Json
from ...numbers import parse_number
from ...schema import ChatCompletionRequest
from ...schema.gemini import GeminiRequest
from .parts import ContentReader
from .schema import GenerationConfig, ThinkingConfig, Tool, ToolConfig, in_camel_case

_CONFIG: Final = "generationConfig"
_MESSAGE: Final = re.compile(r"messages\b(?:\[(\d+)\])?")

_NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "stop": "stop_sequences",
    **{name: name for name in ("temperature", "top_p", "top_k", "seed")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "n": "candidate_count",
}
"""Field of a chat completion request -> field of `GenerationConfig`."""

_SENT: Final = {field.name: field.encode_name for field in msgspec.structs.fields(GenerationConfig)}
"""Field of `GenerationConfig` -> its name in a body."""

_KEPT: Final = (
    *("description", "enum", "format", "title", "pattern", "default", "const", "$ref", "$defs"),
    *("minimum", "maximum", "additionalProperties", "required"),
)
_COUNTS: Final = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
)


class GeminiChat(ChatCompletionRequest, kw_only=True):
    """A chat completion request from the Gemini API. `places` are the contents that became the messages."""

    places: list[str] = msgspec.field(default_factory=list)

    def sent_name(self, name: str) -> str:
        """Return the name of a field in the Gemini API."""
        if match := _MESSAGE.match(name):
            return self.places[int(match[1])] if match[1] else "contents"
        if name == "top_logprobs":
            return f"{_CONFIG}.logprobs"
        return f"{_CONFIG}.{_SENT[_NAMES[name]]}" if name in _NAMES else name


def translate(body: GeminiRequest, model: str, *, streams: bool) -> ChatCompletionRequest:
    """Return the body translated to a chat completion request.

    Args:
        body: The body.
        model: The name of the model in the path.
        streams: True for a streamed answer.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    config = _read_config(body)
    reader = ContentReader()
    if body.system is not None:
        is_snake = body.snake_system is not None
        reader.add_system(body.system, "system_instruction" if is_snake else "systemInstruction")
    if not body.contents:
        raise bad_request("contents", "is required")
    reader.add_contents(body.contents)
    with reject_deep_nesting("tools"):
        tools = _tools(body.tools or [])
    return GeminiChat(
        model=model,
        messages=reader.messages,
        places=reader.places,
        stream=streams,
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_config) if tools else None,
        logprobs=config.response_logprobs or None,
        top_logprobs=config.logprobs if config.response_logprobs else None,
        **{name: getattr(config, given) for name, given in _NAMES.items()},
        **_format(config),
        **_thinking(config.thinking_config or ThinkingConfig()),
    )


def _read_config(body: GeminiRequest) -> GenerationConfig:
    return read_part(in_camel_case(body.config or {}), GenerationConfig, _CONFIG)


def _tools(given: list[Json]) -> list[Json]:
    tools = []
    for i, each in enumerate(given):
        shown = in_camel_case(each)
        if shown.get("functionDeclarations") is None:
            raise wrong(
                f"tools[{i}]", "functionDeclarations, because this server runs no tools", each
            )
        for j, function in enumerate(read_part(shown, Tool, f"tools[{i}]").function_declarations):
            schema = function.parameters_json_schema
            if schema is None and function.parameters is not None:
                place = f"tools[{i}].functionDeclarations[{j}].parameters"
                schema = json_schema(function.parameters, place)
            described = {"name": function.name, "description": function.description or ""}
            described["parameters"] = schema or {"type": "object", "properties": {}}
            tools.append({"type": "function", "function": described})
    return tools


def _tool_choice(tool_config: Json | None) -> str | Json | None:
    given = read_part(in_camel_case(tool_config or {}), ToolConfig, "toolConfig")
    config = given.function_calling_config
    if config is None:
        return None
    mode = (config.mode or "AUTO").upper()
    choices = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto"}
    choices |= {"ANY": "required", "NONE": "none"}
    if mode not in choices:
        where = "toolConfig.functionCallingConfig.mode"
        raise wrong(where, "AUTO, ANY, VALIDATED or NONE", mode)
    if not config.allowed_function_names or mode == "NONE":
        return choices[mode]
    names = config.allowed_function_names
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    tools = {"mode": choices[mode], "tools": allowed}
    return {"type": "allowed_tools", "allowed_tools": tools}


def _format(config: GenerationConfig) -> Json:
    """Return the fields for the format of the answer."""
    schema, where = config.response_json_schema, f"{_CONFIG}.responseJsonSchema"
    if schema is None and config.response_schema is not None:
        where = f"{_CONFIG}.responseSchema"
        with reject_deep_nesting(where):
            schema = json_schema(config.response_schema, where)
    if config.response_mime_type == "text/x.enum":
        values = expect(schema, dict, where, "a schema with an enum").get("enum")
        return {"guided_choice": expect(values, list, f"{where}.enum", "an array")}
    if config.response_mime_type != "application/json":
        return {}
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    named = {"name": "output", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _thinking(config: ThinkingConfig) -> Json:
    """Return the fields that enable, disable or show reasoning."""
    fields: Json = {"include_reasoning": bool(config.include_thoughts)}
    if config.thinking_level is not None:
        fields["reasoning_effort"] = config.thinking_level.lower()
    if config.thinking_budget == 0:
        fields["thinking"] = {"type": "disabled"}
    return fields


def thinking_budget(body: GeminiRequest) -> int | None:
    """Return the maximum tokens of reasoning; None for no limit."""
    config = _read_config(body).thinking_config or ThinkingConfig()
    budget = config.thinking_budget
    return budget if budget is not None and budget > 0 else None


def json_schema(schema: Any, where: str) -> Json:
    """Return a schema of Google's form, whose types are in upper case, as JSON schema.

    Raises:
        APIError: A part of it is not an object (400).
    """
    given = in_camel_case(expect(schema, dict, where, "a schema"))
    found: Json = {name: given[name] for name in _KEPT if given.get(name) is not None}
    for name in _COUNTS:
        if (count := given.get(name)) is not None:
            # Google's JSON has 64-bit integers as strings.
            number = parse_number(count) if isinstance(count, str) else None
            found[name] = count if number is None else number
    kind = given.get("type")
    if isinstance(kind, str) and kind.upper() != "TYPE_UNSPECIFIED":
        found["type"] = kind.lower()
    elif isinstance(kind, list):
        found["type"] = kind
    if (parts := given.get("properties")) is not None:
        place = f"{where}.properties"
        expect(parts, dict, place, "an object")
        found["properties"] = {name: json_schema(part, place) for name, part in parts.items()}
    if (items := given.get("items")) is not None:
        found["items"] = json_schema(items, f"{where}.items")
    if (choices := given.get("anyOf")) is not None:
        expect(choices, list, f"{where}.anyOf", "an array")
        found["anyOf"] = [json_schema(each, f"{where}.anyOf") for each in choices]
    return {"anyOf": [found, {"type": "null"}]} if given.get("nullable") else found
