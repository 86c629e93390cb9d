"""Parses tool calls that are a Python list of calls: `[weather(city="Rome"), now()]`."""

import ast
import json
import re
from enum import Enum, auto

from .held_text import may_begin
from .tools import ToolCallDelta, ToolDelta, openai_call_id

_START, _END = "<|python_start|>", "<|python_end|>"
_BEGINNING = re.compile(r"\s*(?:\[\s*(?P<name>[A-Za-z_][\w.]*\s*)?)?")
_STRUCTURE = re.compile(r"""[()\[\]{},"']""")
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


class _State(Enum):
    START = auto()
    CALLS = auto()
    AFTER_CALLS = auto()
    TEXT = auto()


class PythonicToolParser:
    """Parses one text, which is either content, or calls from its first character on.

    A call is emitted when it is complete, because its Python arguments must be converted to JSON as a whole. Whitespace
    and the closing marker after the calls are dropped.
    """

    def __init__(self) -> None:
        self.new_id = openai_call_id
        self._buffer = ""
        self._position = 0  # how far the buffer has been scanned
        self._call_start = 0
        self._brackets = 0
        self._quote = ""
        self._state = _State.START
        self._num_calls = 0
        self._delta = ToolDelta()

    def feed(self, text: str) -> ToolDelta:
        """Return the calls and the content that the next piece of text adds."""
        self._delta = ToolDelta()
        self._buffer += text
        if self._state is _State.START:
            self._read_start()
        if self._state is _State.CALLS:
            self._read_calls()
        if self._state is _State.AFTER_CALLS:
            self._skip_end()
        if self._state is _State.TEXT:
            self._delta.content, self._buffer = self._buffer, ""
        return self._delta

    def finish(self) -> ToolDelta:
        """Return the held-back text at the end."""
        rest, self._buffer = self._buffer, ""
        if (self._state is _State.CALLS and self._num_calls) or (
            self._state is _State.AFTER_CALLS and rest.strip() in ("", _END)
        ):
            rest = ""
        return ToolDelta(rest)

    def _read_start(self) -> None:
        text = self._buffer.lstrip()
        if text != _START and may_begin(text, (_START,)):
            return
        skipped = len(self._buffer) - len(text.removeprefix(_START))
        beginning = _BEGINNING.match(self._buffer, skipped)
        if beginning is None or beginning.end() == len(self._buffer):
            return
        if beginning["name"] and self._buffer[beginning.end()] == "(":
            self._position = self._call_start = beginning.start("name")
            self._brackets = 1
            self._state = _State.CALLS
        else:
            self._state = _State.TEXT

    def _read_calls(self) -> None:
        while self._state is _State.CALLS:
            if self._quote:
                if not self._skip_string():
                    return
                continue
            found = _STRUCTURE.search(self._buffer, self._position)
            if found is None:
                self._position = len(self._buffer)
                return
            self._position = found.end()
            char = found[0]
            if char in "\"'":
                self._quote = char
            elif char in "([{":
                self._brackets += 1
            elif char in ")]}":
                self._brackets -= 1
            if self._brackets == 0 or (self._brackets == 1 and char == ","):
                self._close_call(found.start())

    def _skip_string(self) -> bool:
        """Advance past the end of the string. Return False if more text is needed."""
        for at in range(self._position, len(self._buffer)):
            if self._buffer[at] == "\\":
                if at + 1 == len(self._buffer):
                    self._position = at
                    return False
                self._position = at + 2
                return True
            if self._buffer[at] == self._quote:
                self._quote = ""
                self._position = at + 1
                return True
        self._position = len(self._buffer)
        return False

    def _close_call(self, end: int) -> None:
        source = self._buffer[self._call_start : end].strip()
        call = _parse_call(source)
        if call is not None:
            name, arguments = call
            self._delta.tool_calls += [
                ToolCallDelta(self._num_calls, self.new_id(), name),
                ToolCallDelta(self._num_calls, arguments=arguments),
            ]
            self._num_calls += 1
            self._call_start = self._position
        elif source or not self._num_calls:
            # This is not a call. Emitted calls stay, and the rest is content.
            self._state = _State.TEXT
            if self._num_calls:
                self._buffer = self._buffer[self._call_start :]
            return
        if self._brackets == 0:
            self._state = _State.AFTER_CALLS
            self._buffer = self._buffer[self._position :]

    def _skip_end(self) -> None:
        text = self._buffer.lstrip()
        if may_begin(text, (_END,)):
            return
        self._buffer = text.removeprefix(_END)
        self._state = _State.TEXT


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON constants, which models sometimes write, with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def _parse_call(source: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments if `source` is a call with keyword arguments; None otherwise."""
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = ast.literal_eval(_JsonConstants().visit(keyword.value))
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ast.unparse(call.func), text.encode(errors="replace").decode()
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
