"""`tools` and `tool_choice`: which calls the model may make, and how they are forced."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ...protocol.sampling_params import GrammarKind, StructuredOutput
from .errors import APIError, bad_request, echo, nesting_refused
from .json_schema import lenient, prepare_schema
from .schema import ChatCompletionRequest
from .structured import Constraint

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_SILENT = {"type", "title", "description", "$schema"}
"""Keywords of a schema that say nothing of a function's parameters."""


class ToolMode(enum.Enum):
    """NONE: text only. AUTO: the model decides. REQUIRED: one call or more. NAMED: this one call."""

    NONE = enum.auto()
    AUTO = enum.auto()
    REQUIRED = enum.auto()
    NAMED = enum.auto()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is the function of NAMED, `names` are those of AUTO; `constraint` is what the forced modes must write."""

    mode: ToolMode
    name: str = ""
    names: tuple[str, ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    param: str
    schema: dict[str, Any]
    is_strict: bool

    def prepared(self) -> dict[str, Any]:
        return prepare_schema(self.schema, is_strict=self.is_strict)

    def arguments(self) -> Constraint:
        output = _json_schema(self.prepared(), self.is_strict)
        return Constraint(self.param, output, owner=self.name)


def parse_tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """Raises APIError 400 for tools or a choice that make no sense."""
    tools = _tools_by_name(request.tools or [])
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    # Frameworks send the list of the user's tools, which may be empty, whatever the choice.
    if choice == "none" or (request.tools == [] and choice in ("auto", "required")):
        return ToolChoice(ToolMode.NONE)
    if not tools:
        raise bad_request("tool_choice", f"tool_choice {echo(choice)} needs tools")
    if choice == "auto":
        return ToolChoice(ToolMode.AUTO, names=tuple(tools))
    if choice == "required":
        with nesting_refused("tools"):
            calls = _calls(tools, parallel=request.parallel_tool_calls is not False)
        return ToolChoice(ToolMode.REQUIRED, constraint=calls)
    name = _chosen_name(choice)
    if name not in tools:
        raise bad_request(
            "tool_choice", f"tool_choice names {echo(name)}, tools has {', '.join(tools)}"
        )
    with nesting_refused(tools[name].param):
        return ToolChoice(ToolMode.NAMED, name, constraint=tools[name].arguments())


def _json_schema(schema: dict[str, Any], is_strict: bool) -> StructuredOutput:
    schema = schema if is_strict else lenient(schema)
    return StructuredOutput(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def _chosen_name(choice: str | dict[str, Any]) -> str:
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            name: str = function["name"]
            return name
    raise bad_request(
        "tool_choice",
        "tool_choice must be none, auto, required or "
        f'{{"type": "function", "function": {{"name": ...}}}}, got {echo(choice)}',
    )


def _tools_by_name(tools: list[dict[str, Any]]) -> dict[str, _Tool]:
    by_name: dict[str, _Tool] = {}
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind != "function":
            raise _wrong(f"tools[{i}].type", '"function"', kind)
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"tools[{i}].function", "an object", function)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            expected = "1 to 128 letters, digits, dots, dashes or underscores"
            raise _wrong(f"tools[{i}].function.name", expected, name)
        param, parameters = f"tools[{i}].function.parameters", function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(param, "a JSON schema (an object)", parameters)
        schema: dict[str, Any] = {"type": "object"} | (parameters or {})
        if schema.keys() <= _SILENT:
            # A function without parameters; what may have any says so by `additionalProperties`.
            schema["properties"] = {}
        by_name[name] = _Tool(name, param, schema, is_strict=function.get("strict") is True)
    return by_name


def _calls(tools: dict[str, _Tool], parallel: bool) -> Constraint:
    """An array of {"name", "parameters"} objects, one shape for each tool."""
    shapes = []
    for i, tool in enumerate(tools.values()):
        parameters = _moved_to(f"#/items/anyOf/{i}/properties/parameters", tool.prepared())
        properties = {"name": {"const": tool.name}, "parameters": parameters}
        shapes.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": shapes}}
    if not parallel:
        calls["maxItems"] = 1
    # A document is lenient as a whole, but as a part a strict tool's schema is not.
    output = _json_schema(calls, is_strict=all(tool.is_strict for tool in tools.values()))
    return Constraint("tools", output, parts=tuple(tool.arguments() for tool in tools.values()))


def _moved_to(place: str, schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, changed for that place in a larger document, where its references begin."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict) and not isinstance(part.get("$id"), str):
            # References in a part with an identifier of its own begin there already.
            reference = part.get("$ref")
            if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
                part["$ref"] = place + reference[1:]
            parts += part.values()
    return schema


def _wrong(param: str, expected: str, value: object) -> APIError:
    return bad_request(param, f"{param} must be {expected}, got {echo(value)}")
