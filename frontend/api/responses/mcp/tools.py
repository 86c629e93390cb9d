"""Parse tools of the type `mcp` in requests of the Responses API, and show them to the model as functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ....http.errors import bad_request, echo, expect, wrong
from ...logprobs import Json

MCP: Final = "mcp"

LISTED: Final = "mcp_list_tools"
CALL: Final = "mcp_call"
APPROVAL_REQUEST: Final = "mcp_approval_request"
APPROVAL_RESPONSE: Final = "mcp_approval_response"

SECRETS: Final = ("authorization", "headers")
"""The fields of a tool that responses do not repeat."""

SEPARATE: Final = (LISTED, CALL, APPROVAL_REQUEST)
"""Types of items of the output that have no pieces."""

_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_APPROVALS: Final = ("always", "never")


@dataclass(slots=True)
class McpTool:
    """The tools of one MCP server that a request offers to the model.

    Attributes:
        where: The request field, for errors.
        label: The name of the server. It is the namespace of the functions.
        url: The address of the server.
        headers: The HTTP headers for the server.
        allowed: The names of the tools that may be called; None for all.
        only_reads: True if only tools that change nothing may be called.
        approvals: The name of a tool -> whether the client must approve its calls; "" for the others.
        tools: The tools: their names, descriptions, schemas and annotations.
    """

    where: str
    label: str
    url: str
    headers: dict[str, str]
    allowed: frozenset[str] | None
    only_reads: bool
    approvals: Mapping[str, bool]
    tools: list[Json] = field(default_factory=list)

    def needs_approval(self, name: str) -> bool:
        """Return whether the client must approve a call."""
        return self.approvals.get(name, self.approvals[""])

    @property
    def namespace(self) -> Json:
        """The tools as the functions of a namespace."""
        functions = [
            {
                "type": "function",
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            }
            for tool in self.tools
            if self._may_call(tool)
        ]
        return {"type": "namespace", "name": self.label, "tools": functions}

    def _may_call(self, tool: Json) -> bool:
        if self.allowed is not None and tool["name"] not in self.allowed:
            return False
        return not self.only_reads or bool((tool.get("annotations") or {}).get("readOnlyHint"))


def has_mcp(tools: Iterable[Json] | None) -> bool:
    """Return whether there is a tool of the type `mcp`."""
    return any(tool.get("type") == MCP for tool in tools or ())


def parse_tools(tools: Iterable[Json] | None, servers: Mapping[str, str]) -> dict[str, McpTool]:
    """Return the tools of MCP servers, by label. `servers` has the URLs of those that may be called.

    Raises:
        APIError: A field is invalid, or a server may not be called (400).
    """
    found: dict[str, McpTool] = {}
    for i, given in enumerate(tools or ()):
        if given.get("type") == MCP:
            tool = _parse(given, f"tools[{i}]", servers)
            if found.setdefault(tool.label, tool) is not tool:
                raise bad_request(f"{tool.where}.server_label", "is that of another tool, too")
    return found


def _parse(tool: Json, where: str, servers: Mapping[str, str]) -> McpTool:
    if not servers:
        raise bad_request(
            f"{where}.type", "mcp needs a server that was started with --mcp-servers LABEL=URL"
        )
    label = tool.get("server_label")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        wanted = "a text of 1 to 64 letters, digits, hyphens and underscores"
        raise wrong(f"{where}.server_label", wanted, label)
    url = tool.get("server_url") or servers.get(label)
    if url not in servers.values():
        name = "server_url" if tool.get("server_url") else "server_label"
        raise bad_request(
            f"{where}.{name}",
            f"must be one of those of --mcp-servers ({', '.join(servers)}), got {echo(tool.get(name))}",
        )
    assert isinstance(url, str)
    headers = expect(tool.get("headers") or {}, dict, f"{where}.headers", "an object")
    for name, value in headers.items():
        expect(value, str, f"{where}.headers.{name}", "a string")
    if (token := tool.get("authorization")) is not None:
        expect(token, str, f"{where}.authorization", "a string")
        headers = headers | {"Authorization": f"Bearer {token}"}
    given = tool.get("allowed_tools")
    chosen = given if isinstance(given, dict) else {"tool_names": given}
    names = _names(chosen, f"{where}.allowed_tools")
    if names is not None and "*" in names:
        # vLLM's name of all tools.
        names = None
    approvals = _parse_approvals(tool.get("require_approval"), f"{where}.require_approval")
    return McpTool(where, label, url, headers, names, bool(chosen.get("read_only")), approvals)


def _names(chosen: Json, where: str) -> frozenset[str] | None:
    names = chosen.get("tool_names")
    if names is None:
        return None
    expect(names, list, where, "a list of names")
    return frozenset(expect(name, str, f"{where}[{i}]", "a name") for i, name in enumerate(names))


def _parse_approvals(given: Any, where: str) -> dict[str, bool]:
    if given is None:
        return {"": True}
    if isinstance(given, dict):
        # If only some are named, the others have the other choice; in doubt they need approval.
        approvals = {"": list(given) != ["always"]}
        for choice in _APPROVALS:
            chosen = expect(given.get(choice) or {}, dict, f"{where}.{choice}", "an object")
            for name in _names(chosen, f"{where}.{choice}.tool_names") or ():
                approvals[name] = choice == "always"
        return approvals
    if given not in _APPROVALS:
        raise wrong(where, '"always", "never" or an object of both', given)
    return {"": given == "always"}


def choose_tool(choice: Any, tools: Mapping[str, McpTool]) -> Any:
    """Return a choice of a tool with an MCP server's tools as functions of a namespace; any other choice unchanged.

    Raises:
        APIError: The request has no such tool (400).
    """
    if not isinstance(choice, dict) or choice.get("type") != MCP:
        return choice
    label, name = choice.get("server_label"), choice.get("name")
    tool = tools.get(str(label))
    if tool is None:
        raise bad_request("tool_choice.server_label", f"is of no tool, got {echo(label)}")
    if name is not None:
        return {"type": "function", "namespace": label, "name": name}
    functions = [
        {"type": "function", "namespace": label, "name": each["name"]}
        for each in tool.namespace["tools"]
    ]
    return {"type": "allowed_tools", "mode": "required", "tools": functions}


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Raise ValueError if they are not a JSON object."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the arguments are not a JSON object: {error}") from None
    return arguments
