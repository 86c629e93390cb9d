"""Tool calls that a grammar forces: `required` writes an array of calls, a named choice its arguments.

Both are read as they arrive, so that arguments stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from ...chat import ToolCallDelta
from ...chat.tools import ToolDelta

_FIRST_CHARACTERS_OF_JSON: Final = '{["-0123456789tfn'


class ForcedCallParser:
    """The tool parser of a text that is calls and nothing else.

    A text that ends before its first call begins becomes content.
    """

    def __init__(self, calls: NamedCall | RequiredCalls) -> None:
        self._calls = calls
        self.new_id = calls.new_id
        self._held: list[str] | None = []
        """The text so far, None once a call has begun."""

    def feed(self, text: str) -> ToolDelta:
        calls = self._calls.read(text)
        if calls:
            self._held = None
        elif self._held is not None:
            self._held.append(text)
        return ToolDelta(tool_calls=calls)

    def finish(self) -> ToolDelta:
        held, self._held = self._held, None
        return ToolDelta(content="".join(held or ()).strip())


class NamedCall:
    """The whole text is the arguments of one function, or with `is_input` the input of one custom tool.

    Arguments are JSON. Anything else, such as the beginning of reasoning that was cut, begins no call.
    """

    def __init__(self, name: str, new_id: Callable[[], str], *, is_input: bool = False) -> None:
        self._name = name
        self.new_id = new_id
        self._is_input = is_input
        self._started = False

    def read(self, text: str) -> list[ToolCallDelta]:
        if self._started:
            return [ToolCallDelta(0, arguments=text)] if text else []
        if not self._is_input:
            text = text.lstrip()
            if text and text[0] not in _FIRST_CHARACTERS_OF_JSON:
                return []
        if not text:
            return []
        self._started = True
        return [ToolCallDelta(0, self.new_id(), self._name, text)]


class RequiredCalls:
    """The text is `[{"name": ..., "parameters": {...}}, ...]`, with any white space between."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.new_id = new_id
        self._index = -1
        self._nesting = 0
        self._in_string = False
        self._escaped = False
        self._header = ""
        self._in_arguments = False

    def read(self, text: str) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        piece_start = 0 if self._in_arguments else None
        for position, character in enumerate(text):
            if self._in_string:
                self._pass_string_character(character)
            elif character == '"':
                self._in_string = True
            elif character in "[{":
                self._nesting += 1
                if self._nesting == 2:
                    self._header = ""
                elif self._nesting == 3 and not self._in_arguments:
                    self._in_arguments = True
                    self._index += 1
                    name = _name_in(self._header)
                    deltas.append(ToolCallDelta(self._index, self.new_id(), name, ""))
                    piece_start = position
            elif character in "]}":
                self._nesting -= 1
                if self._in_arguments and self._nesting == 2 and piece_start is not None:
                    piece = text[piece_start : position + 1]
                    deltas.append(ToolCallDelta(self._index, arguments=piece))
                    self._in_arguments, piece_start = False, None
            if not self._in_arguments:
                self._header += character
        if piece_start is not None and piece_start < len(text):
            deltas.append(ToolCallDelta(self._index, arguments=text[piece_start:]))
        return deltas

    def _pass_string_character(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _name_in(header: str) -> str:
    """The function's name in `{"name": "f", "parameters":`, which is closed to make it JSON."""
    name: str = json.loads(header + "null}")["name"]
    return name
