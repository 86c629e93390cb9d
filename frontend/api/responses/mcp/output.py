"""The output of a response of several turns: the events of each turn become those of one response."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from ...logprobs import Json
from ..answer import EventWriter
from ..ids import item_id
from .session import Call, CallResult
from .tools import APPROVAL_REQUEST, APPROVAL_RESPONSE, CALL, LISTED, McpTool

_FRAME: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ARGUMENTS: Final = "response.function_call_arguments."


class McpOutput:
    """Collects the items of all turns, and writes their events.

    A call of a function in the namespace of a server becomes a call of the server's tool, or the request to approve it.

    Args:
        response_id: The identifier of the response.
        tools: The servers by label.

    Attributes:
        writer: The events.
        items: The items so far.
        pending: The items of calls that have not been run.
        final: The last turn as a response of its own; None before its end.
    """

    def __init__(self, response_id: str, tools: dict[str, McpTool]) -> None:
        self._response_id = response_id
        self._tools = tools
        self.writer = EventWriter()
        self.items: list[Json] = []
        self.pending: list[Json] = []
        self.final: Json | None = None
        # The items of the turn by their number. A request for approval is written when its call is complete.
        self._turn: dict[int, Json] = {}
        self._held: dict[int, Json] = {}

    @property
    def waits_for_client(self) -> bool:
        """True if the last turn has calls that only the client can answer."""
        kinds = {item["type"] for item in self._turn.values()}
        return any(kind == APPROVAL_REQUEST or _is_call_of_client(kind) for kind in kinds)

    def begin_turn(self) -> None:
        """Begin the next turn."""
        self._turn, self._held, self.final = {}, {}, None

    def add_list(self, tool: McpTool) -> None:
        """Add the item that lists the tools of a server."""
        item = self._begin({"type": LISTED, "server_label": tool.label, "tools": [], "error": None})
        place = self._place(item)
        self.writer.emit("response.mcp_list_tools.in_progress", **place)
        item["tools"] = tool.tools
        self.writer.emit("response.mcp_list_tools.completed", **place)
        self._end(item)

    def add_event(self, event: Json) -> None:
        """Add an event of the turn."""
        kind = event["type"]
        if kind in _FRAME:
            return
        if kind in _ENDS:
            self.final = event["response"]
            return
        number = event["output_index"]
        match kind:
            case "response.output_item.added":
                self._add_item(number, event["item"])
            case "response.output_item.done":
                self._finish_item(number, event["item"])
            case _ if number in self._held:
                pass
            case _:
                item = self._turn[number]
                if item["type"] == CALL and kind.startswith(_ARGUMENTS):
                    kind = kind.replace("function_call", CALL)
                fields = {k: v for k, v in event.items() if k not in ("type", "sequence_number")}
                self.writer.emit(kind, **fields | self._place(item))

    def begin_call(self, name: str, label: str, arguments: str, approval: str) -> None:
        """Add the item of a call that the client has approved, which is then pending."""
        item = self._begin(_call_item(label, name) | {"approval_request_id": approval})
        place = self._place(item)
        item["arguments"] = arguments
        self.writer.emit("response.mcp_call.in_progress", **place)
        self.writer.emit("response.mcp_call_arguments.done", **place, arguments=arguments)
        self.pending.append(item)

    def calls(self) -> list[Call]:
        """Return the pending calls."""
        return [Call(i["server_label"], i["name"], i["arguments"]) for i in self.pending]

    def end_calls(self, results: list[CallResult]) -> None:
        """Add the results of the pending calls."""
        for item, result in zip(self.pending, results, strict=True):
            status = "completed" if result.error is None else "failed"
            item |= {"output": result.output, "error": result.error, "status": status}
            self.writer.emit(f"response.mcp_call.{status}", **self._place(item))
            self._end(item)
        self.pending = []

    def _add_item(self, number: int, item: Json) -> None:
        label = item.get("namespace")
        tool = self._tools.get(label) if isinstance(label, str) else None
        if tool is None:
            fields = {name: value for name, value in item.items() if name != "id"}
            self._turn[number] = self._begin(fields)
        elif tool.needs_approval(item["name"]):
            self._held[number] = item
        else:
            self._turn[number] = call = self._begin(_call_item(tool.label, item["name"]))
            self.writer.emit("response.mcp_call.in_progress", **self._place(call))

    def _finish_item(self, number: int, done: Json) -> None:
        if number in self._held:
            item = {"type": APPROVAL_REQUEST, "server_label": done["namespace"]}
            item |= {"name": done["name"], "arguments": done["arguments"]}
            self._turn[number] = item = self._begin(item)
            self._end(item)
            return
        item = self._turn[number]
        if item["type"] == CALL:
            item["arguments"] = done["arguments"]
            if done["status"] == "completed":
                self.pending.append(item)
                return
            item["status"] = "incomplete"
        else:
            item |= {name: value for name, value in done.items() if name != "id"}
        self._end(item)

    def _begin(self, fields: Json) -> Json:
        index = 0x1000 + len(self.items)
        item = {"id": item_id(fields["type"], self._response_id, index), **fields}
        self.items.append(item)
        where = {"output_index": len(self.items) - 1}
        self.writer.emit("response.output_item.added", **where, item=item)
        return item

    def _end(self, item: Json) -> None:
        where = {"output_index": self.items.index(item)}
        self.writer.emit("response.output_item.done", **where, item=item)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": self.items.index(item)}


def _call_item(label: str, name: str) -> dict[str, Any]:
    return {
        "type": CALL,
        "server_label": label,
        "name": name,
        "arguments": "",
        "status": "in_progress",
        "output": None,
        "error": None,
        "approval_request_id": None,
    }


def _is_call_of_client(kind: str) -> bool:
    return kind.endswith("_call") and kind != CALL


def add_usage(total: Json, turn: Json) -> Json:
    """Return the sum of the usage of earlier turns and of another one, whose other fields are kept."""
    summed = dict(turn)
    for name, value in turn.items():
        before = total.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            summed[name] = add_usage(before, value)
        elif isinstance(value, int) and isinstance(before, int):
            summed[name] = before + value
    return summed


def approved_calls(items: Collection[Json]) -> list[Json]:
    """Return the requests for approval that the client has approved and whose calls have not been run yet."""
    done = {item.get("approval_request_id") for item in items if item["type"] == CALL}
    requests = {item["id"]: item for item in items if item["type"] == APPROVAL_REQUEST}
    approved = [
        item.get("approval_request_id")
        for item in items
        if item["type"] == APPROVAL_RESPONSE and item.get("approve") is True
    ]
    return [requests[each] for each in approved if each in requests and each not in done]
