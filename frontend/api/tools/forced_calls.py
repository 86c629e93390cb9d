"""Parses tool calls that a grammar forces: an array of calls (`required`), or the arguments of a named call.

Both are parsed as they arrive, so that arguments stream.
"""

from __future__ import annotations

import json
from typing import Final

from ...chat import CallIds, ToolCallDelta, ToolDelta

_FIRST_CHARACTERS_OF_JSON: Final = '{["-0123456789tfn'


class ForcedCallParser:
    """The tool parser for a text that consists only of calls.

    A text that ends before its first call begins becomes content.
    """

    def __init__(self, calls: NamedCall | RequiredCalls) -> None:
        self._calls = calls
        self._held: list[str] | None = []
        """The pieces of the text so far; None once a call has begun."""

    def feed(self, text: str) -> ToolDelta:
        """Return the calls that the next piece of text adds."""
        calls = self._calls.read(text)
        if calls:
            self._held = None
        elif self._held is not None:
            self._held.append(text)
        return ToolDelta(tool_calls=calls)

    def finish(self) -> ToolDelta:
        """Return the text as content if no call has begun."""
        held, self._held = self._held, None
        return ToolDelta(content="".join(held or ()).strip())


class NamedCall:
    """A text that is the arguments of one function, or (with `is_input`) the input of one custom tool.

    Arguments are JSON. Any other text, such as reasoning that was cut off, does not begin a call.
    """

    def __init__(self, name: str, call_ids: CallIds, *, is_input: bool = False) -> None:
        self._name = name
        self._call_ids = call_ids
        self._is_input = is_input
        self._started = False

    def read(self, text: str) -> list[ToolCallDelta]:
        """Return the calls that the next piece of text adds."""
        if self._started:
            return [ToolCallDelta(0, arguments=text)] if text else []
        if not self._is_input:
            text = text.lstrip()
            if text and text[0] not in _FIRST_CHARACTERS_OF_JSON:
                return []
        if not text:
            return []
        self._started = True
        return [ToolCallDelta(0, self._call_ids.next_id(self._name), self._name, text)]


class RequiredCalls:
    """A text of the form `[{"name": ..., "parameters": {...}}, ...]`, with any white space."""

    def __init__(self, call_ids: CallIds) -> None:
        self._call_ids = call_ids
        self._index = -1
        self._nesting = 0
        self._in_string = False
        self._escaped = False
        self._header = ""
        self._in_arguments = False

    def read(self, text: str) -> list[ToolCallDelta]:
        """Return the calls that the next piece of text adds."""
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
                    deltas.append(
                        ToolCallDelta(self._index, self._call_ids.next_id(name), name, "")
                    )
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
    """Return the function's name in `{"name": "f", "parameters":`. The header is completed to valid JSON first."""
    name: str = json.loads(header + "null}")["name"]
    return name
