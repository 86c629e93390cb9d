"""Tools of MCP servers in requests of Anthropic's Messages API, which the model sees as functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from ....http.errors import bad_request, echo, expect, renaming
from ...logprobs import Json
from ...responses.mcp.session import McpSession
from ...responses.mcp.tools import MCP, McpTool, parse_tools
from ...schema.anthropic import MessagesRequest, ToolChoice

TOOLSET: Final = "mcp_toolset"
USE: Final = "mcp_tool_use"
RESULT: Final = "mcp_tool_result"

_ID: Final = "mcptoolu_"
_NAMES: Final = {
    "server_label": "name",
    "server_url": "url",
    "authorization": "authorization_token",
}


class ServerTools:
    """The tools of a request's `mcp_servers`, and the choices among them.

    Raises:
        APIError: A server may not be called, or a field is invalid (400).
    """

    def __init__(self, body: MessagesRequest, servers: Mapping[str, str]) -> None:
        self._body = body
        given = [_tool_of(server, i) for i, server in enumerate(body.mcp_servers or ())]
        with renaming(_sent_name):
            self._servers = parse_tools(given, servers)
        self._toolsets = _toolsets(body, self._servers)
        # Name of a function as the model calls it -> the server, and the tool.
        self._names: dict[str, tuple[str, str]] = {}

    def session(self) -> McpSession:
        """Return the connections to the servers, which are not open yet."""
        return McpSession(self._servers.values())

    async def list_functions(self, session: McpSession) -> None:
        """Ask the servers for their tools, and apply the choices among them.

        Raises:
            APIError: A server does not answer (424).
        """
        with renaming(lambda name: "mcp_servers" if name == "tools" else name):
            await session.list_tools(())
        for label, (is_default, choices) in self._toolsets.items():
            names = [tool["name"] for tool in self._servers[label].tools]
            allowed = [name for name in names if choices.get(name, is_default)]
            self._servers[label].allowed = frozenset(allowed)
        for server in self._servers.values():
            for function in server.namespace["tools"]:
                shown = _shown(server.label, function["name"])
                self._names[shown] = server.label, function["name"]

    def functions(self) -> list[Json]:
        """Return the request's other tools, and those of the servers as tools of the client."""
        tools = [tool for tool in self._body.tools or () if tool.get("type") != TOOLSET]
        for server in self._servers.values():
            for function in server.namespace["tools"]:
                schema: Json = function["parameters"] or {"type": "object"}
                shown = _shown(server.label, function["name"])
                tool: Json = {"name": shown, "input_schema": schema}
                if function["description"]:
                    tool["description"] = function["description"]
                tools.append(tool)
        return tools

    def choice(self) -> ToolChoice | None:
        """Return the choice of a tool, whose name may be that of a server's tool if no other tool has it."""
        choice = self._body.tool_choice
        if choice is None or any(tool.get("name") == choice.name for tool in self.functions()):
            return choice
        names = [shown for shown, (_, name) in self._names.items() if name == choice.name]
        return replace(choice, name=names[0]) if len(names) == 1 else choice

    def shown_block(self, block: Json) -> Json:
        """Return a block as the client sees it. A call of a server's tool names the server."""
        if block["type"] != "tool_use" or block["name"] not in self._names:
            return block
        label, name = self._names[block["name"]]
        call_id = _ID + block["id"].rpartition("_")[2]
        return {"type": USE, "id": call_id, "name": name, "server_name": label, "input": {}}


def plain_messages(messages: Iterable[Json]) -> list[Json]:
    """Return the client's messages with the calls of servers' tools as calls that the client ran."""
    return [part for each in messages for part in _plain(each)]


def _tool_of(server: Json, index: int) -> Json:
    """Return a server of a request as a tool of the Responses API."""
    where = f"mcp_servers[{index}]"
    if server.get("type", "url") != "url":
        raise bad_request(f"{where}.type", f'must be "url", got {echo(server.get("type"))}')
    tool: Json = {"type": MCP, "require_approval": "never"}
    tool |= {ours: server[name] for ours, name in _NAMES.items() if server.get(name) is not None}
    chosen = server.get("tool_configuration") or {}
    expect(chosen, dict, f"{where}.tool_configuration", "an object")
    names = [] if chosen.get("enabled") is False else chosen.get("allowed_tools")
    return tool if names is None else tool | {"allowed_tools": names}


def _sent_name(name: str) -> str:
    """Return the name in Anthropic's API of a field of a tool of the Responses API."""
    head, dot, field = name.partition(".")
    return head.replace("tools[", "mcp_servers[") + dot + _NAMES.get(field, field)


def _toolsets(
    body: MessagesRequest, tools: Mapping[str, McpTool]
) -> dict[str, tuple[bool, dict[str, bool]]]:
    """Return, by server, whether tools may be called by default, and the choices for single tools."""
    found: dict[str, tuple[bool, dict[str, bool]]] = {}
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") != TOOLSET:
            continue
        where, label = f"tools[{i}]", tool.get("mcp_server_name")
        if not isinstance(label, str) or label not in tools:
            raise bad_request(
                f"{where}.mcp_server_name", f"names none of the mcp_servers, got {echo(label)}"
            )
        default = expect(
            tool.get("default_config") or {}, dict, f"{where}.default_config", "an object"
        )
        configs = expect(tool.get("configs") or {}, dict, f"{where}.configs", "an object")
        is_default = default.get("enabled") is not False
        choices = {}
        for name, config in configs.items():
            place = f"{where}.configs.{name}"
            chosen = expect(config or {}, dict, place, "an object").get("enabled")
            choices[name] = is_default if chosen is None else bool(chosen)
        found[label] = is_default, choices
    return found


def _shown(label: str, name: str) -> str:
    """Return the name of a server's tool for the model."""
    return f"{label}__{name}"


def _plain(message: Json) -> list[Json]:
    """Return a message of the client with the calls of servers' tools as calls that the client ran."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    if not any(isinstance(each, dict) and each.get("type") in (USE, RESULT) for each in blocks):
        return [message]
    return as_turns(blocks)


def as_turns(blocks: list[Json]) -> list[Json]:
    """Return the blocks of an answer as messages: those of the assistant, and of the user with results."""
    turns: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        role, part = "assistant", block
        if kind == USE:
            name = _shown(str(block.get("server_name")), str(block.get("name")))
            part = {
                "type": "tool_use",
                "id": block.get("id"),
                "name": name,
                "input": block.get("input"),
            }
        elif kind == RESULT:
            role, part = "user", {**block, "type": "tool_result"}
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"].append(part)
    return turns
