"""The parts of Gemini's request bodies below the fields of `GeminiRequest`."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from ...schema import Int

_AFTER_UNDERSCORE: Final = re.compile("_([a-z])")
_OPAQUE: Final = (
    *("args", "parameters", "parametersJsonSchema", "response"),
    *("responseJsonSchema", "responseSchema"),
    *("$defs", "anyOf", "const", "default", "items", "properties"),
)
"""Fields whose keys are not names of the API."""


def in_camel_case(value: Any) -> Any:
    """Return a part of a body with the names of its fields in camel case. Google's clients may send snake case."""
    if isinstance(value, list):
        return [in_camel_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        sent = name
        if "_" in name:
            sent = _AFTER_UNDERSCORE.sub(lambda match: match[1].upper(), name)
        if sent == name or value.get(sent) is None:
            is_whole = isinstance(item, str) or sent in _OPAQUE
            found[sent] = item if is_whole else in_camel_case(item)
    return found


class Fields(msgspec.Struct, kw_only=True, rename="camel"):
    """The base of all parts."""


class Blob(Fields):
    """Bytes in base64."""

    mime_type: str
    data: str


class FileData(Fields):
    """A file at a URL."""

    mime_type: str
    file_uri: str


class FunctionCall(Fields):
    """A call of a function."""

    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class FunctionResponse(Fields):
    """The result of a function."""

    name: str
    response: Any = None
    id: str | None = None
    parts: list[Part] | None = None


class Code(Fields):
    """A program that Google's servers ran."""

    code: str | None = None


class CodeResult(Fields):
    """The output of a program that Google's servers ran."""

    output: str | None = None


class Part(Fields):
    """A part of a content, which has one of these fields."""

    text: str | None = None
    thought: bool | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: Code | None = None
    code_execution_result: CodeResult | None = None


class Content(Fields):
    """A turn of a conversation."""

    parts: list[Part | str] | Part
    role: Literal["user", "model", "function", ""] | None = None


class Contents(Fields):
    """The turns of a conversation. A turn may be a text."""

    contents: list[Content | str]


class ThinkingConfig(Fields):
    """The settings of reasoning."""

    include_thoughts: bool | None = None
    thinking_level: str | None = None
    thinking_budget: Int | None = None


class GenerationConfig(Fields):
    """The settings of the answer."""

    max_output_tokens: Int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    candidate_count: Int | None = None
    logprobs: Int | None = None
    response_logprobs: bool | None = None
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    thinking_config: ThinkingConfig | None = None


class Function(Fields):
    """A function that the model may call."""

    name: Any = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class Tool(Fields):
    """The functions that the model may call. Tools of Google's servers have other fields."""

    function_declarations: list[Function]


class FunctionCallingConfig(Fields):
    """The functions that the model may or must call."""

    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(Fields):
    """The settings of calls."""

    function_calling_config: FunctionCallingConfig | None = None
