"""Parses `tools` and the older `functions`: the tools that the model may call."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ....protocol.grammars.json_schema import lenient
from ....protocol.sampling_params import GrammarKind, StructuredOutput
from ...chat.messages import CUSTOM_INPUT
from ...http.errors import bad_request, wrong
from ..schema import ChatCompletionRequest
from ..structured.constraint import Constraint
from ..structured.json_schema import prepare_schema

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ANNOTATIONS = {"type", "title", "description", "$schema"}
"""Schema keywords that do not describe parameters."""


class Tool(msgspec.Struct, frozen=True):
    """A function with parameters, or a custom tool, which is a function whose only parameter is a text.

    Attributes:
        name: The name of the tool.
        param: The request field that errors name.
        schema: The JSON schema of the parameters.
        is_strict: True if the schema must be enforced completely.
        shown: The function in the format that templates read.
        is_custom: True if it is a custom tool.
        grammar: A Lark grammar for the text of a custom tool; None if `schema` describes it.
    """

    name: str
    param: str
    schema: dict[str, Any]
    is_strict: bool
    shown: dict[str, Any]
    is_custom: bool = False
    grammar: str | None = None

    def prepared(self) -> dict[str, Any]:
        """Return the schema in a form that a grammar can enforce."""
        return prepare_schema(self.schema, is_strict=self.is_strict)

    def constrain_call(self) -> Constraint:
        """Return the constraint on a text that must be a call of this tool."""
        if self.grammar is not None:
            output = StructuredOutput(GrammarKind.LARK, self.grammar)
        else:
            output = encode_schema(self.prepared(), self.is_strict)
        return Constraint(self.param, output, owner=self.name)


def encode_schema(schema: dict[str, Any], is_strict: bool) -> StructuredOutput:
    """Return the constraint to a prepared schema."""
    schema = schema if is_strict else lenient(schema)
    return StructuredOutput(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def parse_tools(request: ChatCompletionRequest) -> dict[str, Tool]:
    """Return the tools by name. Raise APIError 400 if a tool is invalid."""
    if request.functions:
        if request.tools:
            raise bad_request("functions", "cannot be combined with tools")
        found = [
            _parse_function(function, f"functions[{i}]")
            for i, function in enumerate(request.functions)
        ]
    else:
        found = [_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    return {tool.name: tool for tool in found}


def tools_for_template(
    tools: list[dict[str, Any]] | None, where: str = "tools"
) -> list[dict[str, Any]]:
    """Return the tools in the field `where` in the format that templates read."""
    return [_parse_tool(tool, f"{where}[{i}]").shown for i, tool in enumerate(tools or ())]


def _parse_tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type", "function")
    if kind == "custom":
        return _parse_custom(tool, where)
    if kind != "function":
        raise wrong(f"{where}.type", '"function" or "custom"', kind)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "an object", function)
    return _parse_function(function, f"{where}.function", shown=tool)


def _parse_function(
    function: dict[str, Any], where: str, shown: dict[str, Any] | None = None
) -> Tool:
    name = _name_of(function, where)
    param, parameters = f"{where}.parameters", function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(param, "a JSON schema (an object)", parameters)
    schema: dict[str, Any] = {"type": "object"} | (parameters or {})
    if schema.keys() <= _ANNOTATIONS:
        # The function has no parameters. A function with arbitrary parameters sets `additionalProperties`.
        schema["properties"] = {}
    return Tool(
        name,
        param,
        schema,
        is_strict=function.get("strict") is True,
        shown=shown or {"type": "function", "function": function},
    )


def _parse_custom(tool: dict[str, Any], where: str) -> Tool:
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise wrong(f"{where}.custom", "an object", custom)
    name = _name_of(custom, f"{where}.custom")
    description = custom.get("description") or ""
    if not isinstance(description, str):
        raise wrong(f"{where}.custom.description", "a string", description)
    text: dict[str, Any] = {"type": "string"}
    param, grammar = f"{where}.custom.format", None
    syntax, definition = _parse_format(custom.get("format"), param)
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax == "lark":
        grammar = definition
    if syntax:
        rule = f"The input must match this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{rule}" if description else rule
    schema = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    shown = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": schema | {"properties": {CUSTOM_INPUT: {"type": "string"}}},
        },
    }
    return Tool(name, param, schema, is_strict=True, shown=shown, is_custom=True, grammar=grammar)


def _parse_format(form: Any, where: str) -> tuple[str, str]:
    """Return the syntax and the definition of a custom tool's grammar; ("", "") if any text is valid."""
    if form is None:
        return "", ""
    if not isinstance(form, dict):
        raise wrong(where, "an object", form)
    kind = form.get("type")
    if kind is None or kind == "text":
        return "", ""
    if kind != "grammar":
        raise wrong(f"{where}.type", '"text" or "grammar"', kind)
    grammar = form.get("grammar", form)
    if not isinstance(grammar, dict):
        raise wrong(f"{where}.grammar", "an object", grammar)
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in ("lark", "regex"):
        raise wrong(f"{where}.grammar.syntax", '"lark" or "regex"', syntax)
    if not (definition and isinstance(definition, str)):
        raise wrong(f"{where}.grammar.definition", "a non-empty string", definition)
    return syntax, definition


def _name_of(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, dots, dashes or underscores"
        raise wrong(f"{where}.name", expected, name)
    return name
