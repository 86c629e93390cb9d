"""Tools as coding agents send them: namespaces of functions, tools that items load, and tools of OpenAI's servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...http.errors import bad_request, echo, expect, expect_text, wrong
from ..logprobs import Json
from .client_tools import CLIENT_TOOLS, TOOL_SEARCH, as_function, is_client_tool

TOOL_KINDS: Final = ("function", "custom")
NAMESPACE: Final = "namespace"

_LOADING: Final = ("additional_tools", "tool_search_output")
"""Types of items that have further tools."""

LEFT_OUT: Final = frozenset({"image_generation", TOOL_SEARCH, "web_search", "web_search_preview"})
"""Types of tools that agents offer with every request but this server cannot run. They are not shown to the model."""

_SEPARATOR: Final = "__"


class PlacedTool(NamedTuple):
    """A tool in the format of chat completions, where its fields are in an inner object.

    Attributes:
        where: The request field of the tool, for error messages.
        tool: The tool. Its name is unique across all namespaces.
        namespace: The namespace of the tool; "" for none.
        name: The name of the tool within its namespace.
        client_tool: The type of a tool that OpenAI defines; "" for any other.
        is_in_output: True if the output of a search, which the model reads, defines the tool.
    """

    where: str
    tool: Json
    namespace: str
    name: Any
    client_tool: str = ""
    is_in_output: bool = False

    @property
    def model_name(self) -> str:
        """The name that the model uses for the tool; "" if the tool has no valid name."""
        name = self.tool[self.tool["type"]].get("name")
        return name if isinstance(name, str) else ""


def full_name(namespace: str, name: str) -> str:
    """Return the name that the model uses for a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith(_SEPARATOR) else _SEPARATOR}{name}"


def place_tools(tools: Iterable[Json] | None, items: Iterable[Json] = ()) -> list[PlacedTool]:
    """Return the tools that are shown to the model, including those of namespaces and those that `items` load.

    Raises:
        APIError: A tool has a type that is not supported, or two tools have the same name (400).
    """
    placed = list(_place_tools(tools or (), "tools"))
    names: dict[str, PlacedTool] = {}
    for each in placed:
        name = each.model_name
        first = names.setdefault(name, each)
        is_same = first is each or not name
        if not is_same and any(tool.namespace or tool.client_tool for tool in (first, each)):
            raise bad_request(
                each.where,
                f"has the full name {echo(name)}, which is also the name of another tool",
            )
    known = {each.model_name for each in placed}
    for i, item in enumerate(items):
        # Searches may load a tool several times.
        for each in place_loaded_tools(item, f"input[{i}]"):
            name = each.model_name
            if not name or name not in known:
                known.add(name)
                placed.append(each)
    return placed


def place_loaded_tools(item: Json, where: str) -> Iterator[PlacedTool]:
    """Yield the tools that an item loads. Raise APIError 400 if one of them is invalid."""
    if item.get("type") in _LOADING:
        tools = expect(item.get("tools"), list, f"{where}.tools", "an array")
        for i, tool in enumerate(tools):
            expect(tool, dict, f"{where}.tools[{i}]", "an object")
        # The model does not read the output of a search that OpenAI's servers ran.
        is_read = item["type"] == "tool_search_output" and item.get("call_id") is not None
        for placed in _place_tools(tools, f"{where}.tools"):
            yield placed._replace(is_in_output=is_read)


def _place_tools(tools: Iterable[Json], param: str) -> Iterator[PlacedTool]:
    for i, tool in enumerate(tools):
        where, kind = f"{param}[{i}]", tool.get("type")
        if is_client_tool(tool):
            yield PlacedTool(where, as_function(tool, where), "", kind, tool["type"])
        elif kind == NAMESPACE:
            yield from _place_namespace(tool, where)
        elif not is_left_out(tool):
            yield _place_tool(tool, where)


def is_left_out(tool: Json) -> bool:
    """Return whether a tool is hidden from the model."""
    kind = tool.get("type")
    if not isinstance(kind, str) or is_client_tool(tool):
        return False
    return kind in LEFT_OUT or kind.startswith("web_search_preview_")


def _place_namespace(group: Json, where: str) -> Iterator[PlacedTool]:
    namespace = expect_text(group, "name", where)
    about = group.get("description")
    tools = expect(group.get("tools"), list, f"{where}.tools", "an array")
    for i, tool in enumerate(tools):
        place = f"{where}.tools[{i}]"
        inner = expect(tool, dict, place, "an object")
        if i == 0 and isinstance(about, str) and about:
            # The model does not see namespaces, so the first function describes the namespace.
            text = inner.get("description")
            inner = inner | {"description": f"{about}\n\n{text}" if text else about}
        yield _place_tool(inner, place, namespace)


def _place_tool(tool: Json, where: str, namespace: str = "") -> PlacedTool:
    kind = tool.get("type")
    if kind not in TOOL_KINDS:
        kinds = '"function" or "custom" within a namespace'
        if not namespace:
            kinds = (
                f'"function", "custom", "namespace", {", ".join(CLIENT_TOOLS)}, '
                "because this server runs no tools itself"
            )
        raise wrong(f"{where}.type", kinds, kind)
    assert isinstance(kind, str)
    if isinstance(tool.get(kind), dict):
        # This is the format of chat completions, which some clients send here.
        return PlacedTool(where, tool, "", tool[kind].get("name"))
    fields = {k: v for k, v in tool.items() if k != "type" and v is not None}
    name = fields.get("name")
    if namespace and isinstance(name, str):
        fields["name"] = full_name(namespace, name)
    return PlacedTool(where, {"type": kind, kind: fields}, namespace, name)


def call_fields(
    tools: Iterable[Json] | None, items: Iterable[Json]
) -> tuple[Mapping[str, Json], frozenset[str]]:
    """Return full name -> the call fields that name the tool, for the tools of namespaces, and the client tools."""
    placed = place_tools(tools, items)
    fields = {
        each.tool[each.tool["type"]]["name"]: {"name": each.name, "namespace": each.namespace}
        for each in placed
        if each.namespace
    }
    return fields, frozenset(each.client_tool for each in placed if each.client_tool)


def choose_full_name(choice: Any) -> Any:
    """Return a reference to a tool, with the full name that the model uses."""
    if not isinstance(choice, dict):
        return choice
    if is_client_tool(choice | {"execution": "client"}):
        return {"type": "function", "name": choice["type"]}
    namespace, name = choice.get("namespace"), choice.get("name")
    if isinstance(namespace, str) and isinstance(name, str):
        return {"type": choice.get("type"), "name": full_name(namespace, name)}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return choice | {"tools": [choose_full_name(tool) for tool in choice["tools"]]}
    return choice
