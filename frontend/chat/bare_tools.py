"""Add the fields that some chat templates read in every tool, although clients may leave them out."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

BARE_TOOLS: Final = [
    {"type": "function", "function": function}
    for function in (
        {"name": "f"},
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    )
]
"""Tools without descriptions and parameters."""


def complete_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of `tools` with descriptions and parameters, empty where they are missing."""
    return [_complete(tool) for tool in tools]


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    given = _described(function)
    parameters = {"type": "object", "properties": {}} | dict(given.get("parameters") or {})
    properties = parameters["properties"]
    if isinstance(properties, Mapping):
        parameters["properties"] = {name: _described(each) for name, each in properties.items()}
    return {**tool, "function": given | {"parameters": parameters}}


def _described(value: Any) -> Any:
    """Return an object with a description; other values as they are."""
    if not isinstance(value, Mapping) or value.get("description") is not None:
        return value
    name = {"name": value["name"]} if "name" in value else {}
    return name | {"description": ""} | {k: v for k, v in value.items() if k != "description"}
