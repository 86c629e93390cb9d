"""Translate requests of Google's Gemini API to chat completion requests.

The API is described at https://ai.google.dev/api/generate-content.
"""

from __future__ import annotations

from typing import Any, Final

from ....http.errors import bad_request, expect, reject_deep_nesting, wrong
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...schema.gemini import GeminiRequest
from .parts import ContentReader, get

_CONFIG: Final = "generationConfig"

_NAMES: Final = {
    "max_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "n": "candidateCount",
    "top_logprobs": "logprobs",
}
"""Field of a chat completion request -> field of `generationConfig`."""

_TYPES: Final[dict[str, tuple[type, str]]] = {
    "max_tokens": (int, "an integer"),
    "stop": (list, "an array of strings"),
    "top_k": (int, "an integer"),
    "seed": (int, "an integer"),
    "n": (int, "an integer"),
    "top_logprobs": (int, "an integer"),
}
"""The types of the fields that are not numbers."""

_KEPT: Final = (
    *("description", "enum", "format", "title", "pattern", "default", "const", "$ref", "$defs"),
    *("minimum", "maximum", "additionalProperties"),
)
_COUNTS: Final = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
)
_MAPS: Final = ("properties",)
_JSON_TYPE: Final = "application/json"
_ENUM_TYPE: Final = "text/x.enum"


class GeminiChat(ChatCompletionRequest, kw_only=True):
    """A chat completion request from the Gemini API."""

    def sent_name(self, name: str) -> str:
        """Return the name of a field in the Gemini API."""
        if name == "messages":
            return "contents"
        return f"{_CONFIG}.{_NAMES[name]}" if name in _NAMES else name


def translate(body: GeminiRequest, model: str, *, streams: bool) -> ChatCompletionRequest:
    """Return the body translated to a chat completion request.

    Args:
        body: The body.
        model: The name of the model in the path.
        streams: True for a streamed answer.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    config = body.config or {}
    fields: Json = {}
    for name, sent in _NAMES.items():
        if (value := get(config, sent)) is not None:
            kind, words = _TYPES.get(name, ((int, float), "a number"))
            fields[name] = expect(value, kind, f"{_CONFIG}.{sent}", words)  # type: ignore[arg-type]
    for i, text in enumerate(fields.get("stop", ())):
        expect(text, str, f"{_CONFIG}.stopSequences[{i}]", "a string")
    reader = ContentReader()
    if body.system is not None:
        is_snake = body.snake_system is not None
        reader.add_system(body.system, "system_instruction" if is_snake else "systemInstruction")
    if not body.contents:
        raise bad_request("contents", "is required")
    reader.add_contents(body.contents, "contents")
    with reject_deep_nesting("tools"):
        tools = _tools(body.tools or [])
    if get(config, "responseLogprobs"):
        fields["logprobs"] = True
    else:
        fields.pop("top_logprobs", None)
    return GeminiChat(
        model=model,
        messages=reader.messages,
        stream=streams,
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_config) if tools else None,
        **fields,
        **_format(config),
        **_thinking(config),
    )


def _tools(given: list[Json]) -> list[Json]:
    tools = []
    for i, tool in enumerate(given):
        declared = get(tool, "functionDeclarations")
        if declared is None:
            raise wrong(
                f"tools[{i}]", "functionDeclarations, because this server runs no tools", tool
            )
        functions = expect(declared, list, f"tools[{i}].functionDeclarations", "an array")
        for j, function in enumerate(functions):
            place = f"tools[{i}].functionDeclarations[{j}]"
            expect(function, dict, place, "an object")
            schema = get(function, "parametersJsonSchema")
            if schema is None and (found := function.get("parameters")) is not None:
                schema = json_schema(found, f"{place}.parameters")
            shown = {"name": function.get("name"), "description": function.get("description") or ""}
            shown["parameters"] = schema or {"type": "object", "properties": {}}
            tools.append({"type": "function", "function": shown})
    return tools


def _tool_choice(tool_config: Json | None) -> str | Json | None:
    where = "toolConfig.functionCallingConfig"
    config = get(tool_config or {}, "functionCallingConfig")
    if config is None:
        return None
    mode = str(expect(config, dict, where, "an object").get("mode") or "AUTO").upper()
    choices = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto"}
    choices |= {"ANY": "required", "NONE": "none"}
    if mode not in choices:
        raise wrong(f"{where}.mode", "AUTO, ANY, VALIDATED or NONE", mode)
    names = get(config, "allowedFunctionNames")
    if not names or mode == "NONE":
        return choices[mode]
    expect(names, list, f"{where}.allowedFunctionNames", "an array")
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    tools = {"mode": choices[mode], "tools": allowed}
    return {"type": "allowed_tools", "allowed_tools": tools}


def _format(config: Json) -> Json:
    """Return the fields for the format of the answer."""
    schema, where = get(config, "responseJsonSchema"), f"{_CONFIG}.responseJsonSchema"
    if schema is None and (found := get(config, "responseSchema")) is not None:
        where = f"{_CONFIG}.responseSchema"
        with reject_deep_nesting(where):
            schema = json_schema(found, where)
    kind = get(config, "responseMimeType")
    if kind not in (None, "text/plain", _JSON_TYPE, _ENUM_TYPE):
        expected = f'"text/plain", "{_JSON_TYPE}" or "{_ENUM_TYPE}"'
        raise wrong(f"{_CONFIG}.responseMimeType", expected, kind)
    if kind == _ENUM_TYPE:
        values = expect(schema, dict, where, "a schema with an enum").get("enum")
        return {"guided_choice": expect(values, list, f"{where}.enum", "an array")}
    if kind != _JSON_TYPE:
        return {}
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    named = {"name": "output", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _thinking(config: Json) -> Json:
    """Return the fields that enable, disable, limit or show reasoning."""
    given = get(config, "thinkingConfig")
    thinking: Json = expect(
        {} if given is None else given, dict, f"{_CONFIG}.thinkingConfig", "an object"
    )
    fields: Json = {"include_reasoning": bool(get(thinking, "includeThoughts"))}
    if isinstance(level := get(thinking, "thinkingLevel"), str):
        fields["reasoning_effort"] = level.lower()
    budget = get(thinking, "thinkingBudget")
    if budget is not None:
        expect(budget, int, f"{_CONFIG}.thinkingConfig.thinkingBudget", "an integer")
        if budget == 0:
            fields["thinking"] = {"type": "disabled"}
    return fields


def thinking_budget(body: GeminiRequest) -> int | None:
    """Return the maximum tokens of reasoning; None for no limit."""
    budget = get(get(body.config or {}, "thinkingConfig") or {}, "thinkingBudget")
    return budget if isinstance(budget, int) and budget > 0 else None


def json_schema(schema: Any, where: str) -> Json:
    """Return a schema of Google's form, whose types are in upper case, as JSON schema.

    Raises:
        APIError: A part of it is not an object (400).
    """
    expect(schema, dict, where, "a schema")
    found: Json = {name: schema[name] for name in _KEPT if schema.get(name) is not None}
    for name in _COUNTS:
        if (count := get(schema, name)) is not None:
            # Google's JSON has 64-bit integers as strings.
            is_text = isinstance(count, str) and count.isdecimal()
            found[name] = int(count) if is_text else count
    kind = schema.get("type")
    if isinstance(kind, str) and kind.upper() != "TYPE_UNSPECIFIED":
        found["type"] = kind.lower()
    elif isinstance(kind, list):
        found["type"] = kind
    for name in _MAPS:
        if (parts := schema.get(name)) is not None:
            expect(parts, dict, f"{where}.{name}", "an object")
            found[name] = {key: json_schema(part, f"{where}.{name}") for key, part in parts.items()}
    if (items := schema.get("items")) is not None:
        found["items"] = json_schema(items, f"{where}.items")
    if (choices := get(schema, "anyOf")) is not None:
        expect(choices, list, f"{where}.anyOf", "an array")
        found["anyOf"] = [json_schema(each, f"{where}.anyOf") for each in choices]
    if (required := schema.get("required")) is not None:
        found["required"] = required
    if schema.get("nullable"):
        found = {"anyOf": [found, {"type": "null"}]}
    return found
