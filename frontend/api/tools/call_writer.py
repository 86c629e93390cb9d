"""Write tool calls into a response: function calls, calls of custom tools, and the older `function_call`."""

from __future__ import annotations

import msgspec

from ...chat import ToolCallDelta
from ...chat.messages import CUSTOM_INPUT
from ..logprobs import Json
from .tool_choice import ToolChoice


class CallWriter:
    """Writes the calls of one choice."""

    def __init__(self, tools: ToolChoice) -> None:
        self._tools = tools
        self._inputs = _CustomInputs(tools)
        self._custom_indices: set[int] = set()

    def translate(self, deltas: list[ToolCallDelta], *, is_end: bool) -> list[ToolCallDelta]:
        """Return the calls, where a custom tool's input replaces the arguments that contain it."""
        if not self._tools.custom:
            return deltas
        if not self._tools.writes_input:
            deltas = self._inputs.read(deltas)
            if is_end:
                deltas += self._inputs.finish()
        self._custom_indices |= {d.index for d in deltas if d.name in self._tools.custom}
        return deltas

    def whole(self, deltas: list[ToolCallDelta]) -> Json:
        """Return the message fields that hold these calls, complete."""
        calls: dict[int, Json] = {}
        for delta in deltas:
            kind, field = self._kind_of(delta.index)
            if delta.name is not None:
                body = {"name": delta.name, field: ""}
                calls[delta.index] = {"id": delta.id, "type": kind, kind: body}
            calls[delta.index][kind][field] += delta.arguments
        return self._fields(list(calls.values()))

    def pieces(self, deltas: list[ToolCallDelta]) -> Json:
        """Return the fields of a stream's delta, one piece per call, because some clients read only the first."""
        pieces: dict[int, Json] = {}
        for delta in deltas:
            kind, field = self._kind_of(delta.index)
            piece = pieces.setdefault(delta.index, {"index": delta.index})
            body = piece.setdefault(kind, {})
            if delta.name is not None:
                piece |= {"id": delta.id, "type": kind}
                body["name"] = delta.name
            body[field] = body.get(field, "") + delta.arguments
        return self._fields(list(pieces.values()))

    def is_custom(self, index: int) -> bool:
        """Return whether a call that was written is a call of a custom tool."""
        return index in self._custom_indices

    def _kind_of(self, index: int) -> tuple[str, str]:
        if self.is_custom(index):
            return "custom", "input"
        return "function", "arguments"

    def _fields(self, calls: list[Json]) -> Json:
        if self._tools.is_legacy:
            return {"function_call": calls[0]["function"]}
        return {"tool_calls": calls}


class _CustomInputs:
    """Extracts the inputs of custom tools from the arguments `{"input": ...}` that models write.

    A call is held back until its arguments are complete or another call begins, and then returned in one piece.
    """

    def __init__(self, tools: ToolChoice) -> None:
        self._names = tools.custom
        self._open: ToolCallDelta | None = None
        self._arguments: list[str] = []

    def read(self, deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
        ready: list[ToolCallDelta] = []
        for delta in deltas:
            if self._open is not None and delta.index == self._open.index:
                self._arguments.append(delta.arguments)
                continue
            ready += self.finish()
            if delta.name in self._names:
                self._open, self._arguments = delta, [delta.arguments]
            else:
                ready.append(delta)
        return ready

    def finish(self) -> list[ToolCallDelta]:
        """Return the call that was held back. If its arguments were cut off, it has the input up to there."""
        if self._open is None:
            return []
        call, self._open = self._open, None
        text = _input_in("".join(self._arguments))
        return [ToolCallDelta(call.index, call.id, call.name, text)]


def _input_in(arguments: str) -> str:
    """Return the input that a call's arguments contain, or the arguments if they have another form.

    The arguments are JSON that may be cut off.
    """
    # An escape has at most 12 characters: two halves of a surrogate pair.
    for end in range(len(arguments), max(0, len(arguments) - 12), -1):
        for rest in ("", '"}'):
            try:
                fields = msgspec.json.decode(arguments[:end] + rest, type=dict[str, object])
            except (msgspec.DecodeError, RecursionError):
                continue
            text = fields.get(CUSTOM_INPUT)
            if text is None and len(fields) == 1:
                [text] = fields.values()
            return text if isinstance(text, str) else arguments
    is_cut = arguments.lstrip().startswith("{") and not arguments.rstrip().endswith("}")
    return "" if is_cut else arguments
