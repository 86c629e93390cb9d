"""Read arguments that are written as nested elements, each named by its tags."""

from enum import Enum, auto
from typing import Any

import msgspec

from ..held_text import find_first, may_begin, start_of_marker
from .stepwise_arguments import StepwiseArguments
from .tools import Parameters
from .values import json_string, json_value, schema_of, types_of_schema

_LONGEST_NAME = 512


class _Element(msgspec.Struct):
    """An open element. Its `schema` is None if that is unknown, and `bracket` is "" unless it has elements."""

    name: str
    schema: Any
    types: frozenset[str]
    bracket: str = ""
    is_empty: bool = True


class _State(Enum):
    START = auto()
    BETWEEN = auto()
    """The current element has elements, and the next one may follow."""
    VALUE = auto()
    """The current element has no elements so far."""
    STRING = auto()
    """The value of the current element must be a string."""
    UNNAMED = auto()
    """The name of the current value follows in its end tag."""


class ElementArguments(StepwiseArguments):
    """Reads `start (mark<NAME> VALUE mark</NAME>)* end`, with whitespace between elements.

    A value is text, or the members of an object as elements, or the items of an array as elements. The schema, or else
    the name "item", tells objects from arrays. Text that cannot be part of an element belongs to the value around it.
    Strings are emitted as they arrive, other text once it is complete.

    Models may omit the start tag of an element but for its mark, and the mark of an end tag. `markers` end all open
    elements.
    """

    def __init__(
        self, mark: str, start: str, end: str, markers: tuple[str, ...], parameters: Parameters
    ) -> None:
        super().__init__()
        self._mark, self._start, self._end_tag = mark, start, end
        self._stops = (end, *markers)
        self._root = parameters
        self._open = [_Element("", parameters, frozenset(("object",)), "{")]
        self._position = 0  # how far an open value has been searched
        self._state = _State.START
        self._steps = {
            _State.START: self._read_start,
            _State.BETWEEN: self._read_between,
            _State.VALUE: self._read_value,
            _State.STRING: self._read_value,
            _State.UNNAMED: self._read_unnamed,
        }

    def _step(self) -> bool:
        return self._steps[self._state]()

    def _append_held_back(self) -> None:
        if self._state is _State.STRING:
            self._json.append(json_string(self._buffer))

    def _read_start(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(self._start):
            self._consume(len(self._start), _State.BETWEEN)
            return True
        return not may_begin(self._buffer, (self._start,)) and self._end(0, failed=True)

    def _read_between(self) -> bool:
        self._buffer = text = self._buffer.lstrip()
        if self._stops_at(0):
            return False
        if may_begin(text, (self._mark, *self._stops)):
            return False
        if not text.startswith(self._mark):
            return self._end(0, failed=True)
        after = text[len(self._mark) :]
        if not after.startswith("<"):
            self._state, self._position = _State.UNNAMED, len(self._mark)
            return True
        is_end = after.startswith("</")
        name = self._name_at(len(self._mark) + 1 + is_end)
        if name is None:
            return len(after) > _LONGEST_NAME and self._end(0, failed=True)
        if not is_end:
            self._begin(name)
            self._consume(len(self._mark) + len(name) + 2, _State.VALUE)
            return self._read_type()
        # An end tag without a start tag is ignored.
        if any(element.name == name for element in self._open[1:]):
            while self._open[-1].name != name:
                self._close_element()
            self._close_element()
        self._consume(len(self._mark) + len(name) + 3, _State.BETWEEN)
        return True

    def _read_type(self) -> bool:
        if self._open[-1].types == {"string"}:
            self._json.append('"')
            self._state = _State.STRING
        return True

    def _read_value(self) -> bool:
        mark, name = self._mark, self._open[-1].name
        end, unmarked_end = f"{mark}</{name}>", f"</{name}>"
        found = find_first(self._buffer[self._position :], (mark, unmarked_end + mark))
        if found is None:
            self._emit_string(start_of_marker(self._buffer, (mark, unmarked_end + mark)))
            return False
        at = self._position + found[0]
        if found[1] != mark:
            next_mark = at + len(unmarked_end)
            if self._buffer.startswith(end, next_mark):
                self._position = next_mark
                return True
            if may_begin(self._buffer[next_mark:], (end,)):
                self._emit_string(at)
                return False
            self._close_value(at, next_mark)
            return True
        if self._buffer.startswith(end, at):
            self._close_value(at, at + len(end))
            return True
        if self._buffer.startswith(self._stops, at):
            self._close_value(at, at)
            return True
        if self._state is _State.VALUE and not self._buffer[:at].strip():
            return self._read_first_element(at)
        if may_begin(self._buffer[at:], (end, *self._stops)):
            self._emit_string(at)
            return False
        self._position = at + len(mark)
        return True

    def _read_first_element(self, at: int) -> bool:
        """Read what follows the mark at the beginning of a value that may have elements."""
        after = self._buffer[at + len(self._mark) :]
        name = self._name_at(at + len(self._mark) + 1) if after.startswith("<") else None
        if name is not None and not name.startswith("/"):
            element = self._open[-1]
            is_array = "array" in element.types if element.types else name == "item"
            element.bracket = "[" if is_array else "{"
            self._consume(at, _State.BETWEEN)
            return True
        if may_begin(after[:1], ("<",)) and name is None and len(after) <= _LONGEST_NAME:
            return False
        self._position = at + len(self._mark)
        return True

    def _read_unnamed(self) -> bool:
        mark = self._mark
        at = self._buffer.find(mark, self._position)
        if at < 0:
            self._position = start_of_marker(self._buffer, (mark,))
            return False
        if self._buffer.startswith(self._stops, at):
            return self._end(at)
        name = self._name_at(at + len(mark) + 2)
        after = self._buffer[at + len(mark) :]
        if not may_begin(after[:2], ("</",)) or (name is None and len(after) > _LONGEST_NAME):
            return self._end(at, failed=True)
        if name is None:
            return False
        self._begin(name)
        self._json.append(json_value(self._buffer[len(mark) : at], self._open.pop().types))
        self._consume(at + len(mark) + len(name) + 3, _State.BETWEEN)
        return True

    def _stops_at(self, at: int) -> bool:
        """End the arguments if the end or a marker is at this position."""
        if not self._buffer.startswith(self._stops, at):
            return False
        is_end = self._buffer.startswith(self._end_tag, at)
        self._end(at + len(self._end_tag) * is_end)
        return True

    def _name_at(self, at: int) -> str | None:
        """Return the name that begins at a position; None if its end has not arrived."""
        name, end, _ = self._buffer[at : at + _LONGEST_NAME].partition(">")
        return name if end else None

    def _begin(self, name: str) -> None:
        parent = self._open[-1]
        self._json.append(parent.bracket if parent.is_empty else ", ")
        parent.is_empty = False
        is_member = parent.bracket == "{"
        if is_member:
            self._json.append(f'"{json_string(name)}": ')
        schema = schema_of(parent.schema, name if is_member else None, self._root)
        self._open.append(_Element(name, schema, types_of_schema(schema, self._root)))

    def _close_element(self) -> None:
        element = self._open.pop()
        if element.is_empty:
            self._json.append(element.bracket)
        self._json.append("}" if element.bracket == "{" else "]")

    def _close_value(self, end: int, num_consumed: int) -> None:
        """Close the current element, whose text ends at a position."""
        text, types = self._buffer[:end], self._open.pop().types
        if self._state is _State.STRING:
            self._json.append(f'{json_string(text)}"')
        elif not text.strip() and "string" not in types and types & {"array", "object"}:
            self._json.append("[]" if "array" in types else "{}")
        else:
            self._json.append(json_value(text, types))
        self._consume(num_consumed, _State.BETWEEN)

    def _emit_string(self, end: int) -> None:
        """Emit an open string up to a position, up to which any value has been searched."""
        self._position = end
        if self._state is _State.STRING:
            self._json.append(json_string(self._buffer[:end]))
            self._buffer, self._position = self._buffer[end:], 0

    def _consume(self, count: int, then: _State) -> None:
        self._buffer, self._position, self._state = self._buffer[count:], 0, then

    def _end(self, num_consumed: int, *, failed: bool = False) -> bool:
        while self._open:
            self._close_element()
        self.rest, self.failed = self._buffer[num_consumed:], failed
        return False
