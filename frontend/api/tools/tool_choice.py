"""Parse `tool_choice` and the older `function_call`: which calls are allowed, and whether they are forced."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....protocol.grammars.json_schema import Schema, relocate_references
from ...chat import Parameters
from ...http.errors import bad_request, echo, reject_deep_nesting, wrong
from ..schema import ChatCompletionRequest
from ..structured.constraint import Constraint, parse_constraint
from .tool_definitions import Tool, encode_schema, parse_tools

_CHOICES: Final = (
    'none, auto, required, {"type": "function", "function": {"name": ...}}, '
    '{"type": "custom", "custom": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


class ToolMode(enum.Enum):
    """The kinds of tool choice.

    NONE: text only. AUTO: the model decides. REQUIRED: at least one call. NAMED: one call of one tool.
    """

    NONE = enum.auto()
    AUTO = enum.auto()
    REQUIRED = enum.auto()
    NAMED = enum.auto()


class ToolChoice(msgspec.Struct, frozen=True):
    """The tool calls that an answer may have.

    Attributes:
        mode: The mode, which says if calls are possible, forced or disabled.
        name: The tool that must be called in the mode NAMED.
        functions: Name of a tool -> its parameters, in the mode AUTO.
        schemas: Name of a strict tool -> the schema that its arguments must match, in the mode AUTO.
        parts: The constraints on the arguments of the strict tools, in the mode AUTO.
        constraint: The constraint on the text in the forced modes.
        shown: The tools in the format that templates read; empty in the mode NONE.
        custom: The names of the custom tools that may be called.
        writes_input: True if the whole text is a custom tool's input, in the mode NAMED.
        is_limited: True if a grammar must limit the calls, in the mode AUTO: the model sees tools that it may not
            call, or tools are strict.
        is_legacy: True if the request uses `functions`, which allow one call at a time.
        is_parallel: True if there may be several calls.
    """

    mode: ToolMode
    name: str = ""
    functions: Mapping[str, Parameters] = msgspec.field(default_factory=dict)
    schemas: Mapping[str, Schema] = msgspec.field(default_factory=dict)
    parts: tuple[Constraint, ...] = ()
    constraint: Constraint | None = None
    shown: tuple[dict[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    writes_input: bool = False
    is_limited: bool = False
    is_legacy: bool = False
    is_parallel: bool = True


def parse_tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """Return the tool calls that the answer may have. Raise APIError 400 if the tools or the choice are invalid."""
    tools = parse_tools(request)
    is_legacy = bool(request.functions)
    param, choice = _choice_of(request, is_legacy)
    if choice is None:
        choice = "auto" if tools else "none"
    # Some frameworks always send tool_choice auto, even with an empty list of tools.
    if choice == "none" or (choice == "auto" and [] in (request.tools, request.functions)):
        return ToolChoice(ToolMode.NONE)
    if not tools:
        needed = "functions" if param == "function_call" else "tools"
        raise bad_request(param, f"{echo(choice)} needs {needed}, but the request has none")
    allowed, choice = _allowed_tools(tools, choice)
    is_parallel = request.parallel_tool_calls is not False and not is_legacy
    shown = tuple(tool.shown for tool in tools.values() if request.shows_tool(tool.name))
    custom = frozenset(tool.name for tool in allowed.values() if tool.is_custom)
    if choice == "auto":
        strict = [tool for tool in allowed.values() if tool.is_strict and not tool.is_custom]
        with reject_deep_nesting("tools"):
            schemas = {tool.name: tool.prepared() for tool in strict}
            parts = tuple(tool.constrain_call() for tool in strict)
        return ToolChoice(
            ToolMode.AUTO,
            functions={name: tool.schema for name, tool in allowed.items()},
            schemas=schemas,
            parts=parts,
            shown=shown,
            custom=custom,
            is_limited=len(allowed) < len(tools) or bool(strict),
            is_legacy=is_legacy,
            is_parallel=is_parallel,
        )
    _refuse_constraint(request, param, choice)
    if choice == "required":
        with reject_deep_nesting("tools"):
            calls = _constrain_calls(allowed, is_parallel)
        return ToolChoice(
            ToolMode.REQUIRED,
            constraint=calls,
            shown=shown,
            custom=custom,
            is_parallel=is_parallel,
        )
    name = _chosen_name(choice, param)
    if name not in tools:
        raise bad_request(param, f"must name one of the tools {', '.join(tools)}, got {echo(name)}")
    tool = tools[name]
    with reject_deep_nesting(tool.param):
        return ToolChoice(
            ToolMode.NAMED,
            name,
            constraint=tool.constrain_call(),
            shown=shown,
            custom=custom,
            writes_input=tool.grammar is not None,
            is_legacy=is_legacy,
            is_parallel=False,
        )


def _choice_of(
    request: ChatCompletionRequest, is_legacy: bool
) -> tuple[str, str | dict[str, Any] | None]:
    """Return the field that holds the choice, and its value."""
    if request.function_call is None:
        # Mistral's clients call it "any".
        return "tool_choice", "required" if request.tool_choice == "any" else request.tool_choice
    if request.tool_choice is not None:
        raise bad_request("function_call", "cannot be combined with tool_choice")
    choice = request.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    elif choice not in ("none", "auto"):
        raise wrong("function_call", 'none, auto or {"name": ...}', choice)
    if request.tools and not is_legacy and choice != "none":
        raise bad_request("function_call", "needs functions; use tool_choice with tools")
    return "function_call", choice


def _refuse_constraint(request: ChatCompletionRequest, param: str, choice: object) -> None:
    """Raise APIError 400 if a constraint is combined with a tool choice that allows no text.

    A response format has no effect then, because it is a form of text.
    """
    constraint = parse_constraint(request)
    if constraint is not None and not constraint.param.startswith("response_format"):
        field = constraint.param.split(".")[0]
        raise bad_request(
            field,
            f"cannot be combined with {param} {echo(choice)}, which allows tool calls only; "
            f'omit {field}, or use {param} "auto"',
        )


def _allowed_tools(
    tools: dict[str, Tool], choice: str | dict[str, Any]
) -> tuple[dict[str, Tool], str | dict[str, Any]]:
    """Return the tools that may be called, and the choice among them."""
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return tools, choice
    # The Responses API has the same fields, without the inner object.
    where, wanted = "tool_choice", choice
    if "allowed_tools" in choice:
        where, wanted = "tool_choice.allowed_tools", choice["allowed_tools"]
    if not isinstance(wanted, dict):
        raise wrong(where, "an object", wanted)
    mode, references = wanted.get("mode"), wanted.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{where}.mode", '"auto" or "required"', mode)
    if not (isinstance(references, list) and references):
        raise wrong(f"{where}.tools", "a non-empty array", references)
    allowed: dict[str, Tool] = {}
    for i, reference in enumerate(references):
        name = _referenced_name(reference)
        if name is None or name not in tools:
            raise bad_request(
                f"{where}.tools[{i}]",
                f"must name one of the tools {', '.join(tools)}, got {echo(reference)}",
            )
        allowed[name] = tools[name]
    return allowed, mode


def _referenced_name(reference: Any) -> str | None:
    if not isinstance(reference, dict):
        return None
    kind = reference.get("type", "function")
    named = reference.get(kind, reference) if kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _chosen_name(choice: str | dict[str, Any], param: str) -> str:
    name = _referenced_name(choice)
    if name is None:
        raise wrong(param, _CHOICES, choice)
    return name


def _constrain_calls(tools: dict[str, Tool], is_parallel: bool) -> Constraint:
    """Return a constraint to an array of {"name", "parameters"} objects, with one alternative per tool."""
    shapes = []
    for i, tool in enumerate(tools.values()):
        if tool.grammar is not None:
            raise bad_request(
                f"{tool.param}.grammar.syntax",
                f"of {tool.name} must be regex if tool_choice is required, "
                'got "lark"; name the tool in tool_choice, or use tool_choice auto',
            )
        parameters = relocate_references(
            f"#/items/anyOf/{i}/properties/parameters", tool.prepared()
        )
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
    if not is_parallel:
        calls["maxItems"] = 1
    # Leniency applies to a whole document. The parts are also checked alone, so a strict tool's schema stays strict.
    output = encode_schema(calls, is_strict=all(tool.is_strict for tool in tools.values()))
    parts = tuple(tool.constrain_call() for tool in tools.values())
    return Constraint("tools", output, parts=parts)
