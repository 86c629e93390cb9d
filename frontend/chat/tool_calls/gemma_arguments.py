"""Read arguments in the notation of Gemma models: `{city:<|"|>Rome<|"|>,days:[1,2]}`."""

import re
from enum import Enum, auto
from typing import Final

from ..held_text import find_first, may_begin, start_of_marker
from .json_scanner import decode_string
from .stepwise_arguments import StepwiseArguments
from .values import json_string, json_value

_ENDS: Final = (",", "]", "}")
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONGEST_KEY: Final = 512
_ANY_TYPE: Final[frozenset[str]] = frozenset()


class _State(Enum):
    VALUE = auto()
    FIRST_ELEMENT = auto()
    KEY = auto()
    FIRST_KEY = auto()
    STRING = auto()
    AFTER = auto()


class GemmaArguments(StepwiseArguments):
    """Reads one object in which keys are not quoted and strings stand between two `quote` markers.

    Strings are emitted as they arrive. Any other marker ends an object that is still open.
    """

    def __init__(self, quote: str, markers: tuple[str, ...]) -> None:
        super().__init__()
        self._quote = quote
        self._ends = (*_ENDS, *markers)
        self._state = _State.VALUE
        self._brackets = ""

    def _append_held_back(self) -> None:
        if self._state is _State.STRING:
            self._json.append(json_string(self._buffer))

    def _step(self) -> bool:
        if self._state is _State.STRING:
            return self._read_string()
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        match self._state:
            case _State.KEY | _State.FIRST_KEY:
                return self._read_key()
            case _State.AFTER:
                return self._read_after()
        return self._read_value()

    def _consume(self, count: int, json: str, then: _State) -> bool:
        self._buffer = self._buffer[count:]
        self._json.append(json)
        self._state = then
        return True

    def _fail(self) -> bool:
        self.rest, self.failed = self._buffer, True
        return False

    def _read_string(self) -> bool:
        end = self._buffer.find(self._quote)
        if end >= 0:
            json = json_string(self._buffer[:end]) + '"'
            return self._consume(end + len(self._quote), json, _State.AFTER)
        held_from = start_of_marker(self._buffer, (self._quote,))
        self._consume(held_from, json_string(self._buffer[:held_from]), _State.STRING)
        return False

    def _read_key(self) -> bool:
        text, quote = self._buffer, self._quote
        if text[0] == "}" and self._state is _State.FIRST_KEY:
            return self._close("}")
        end = text.find(":", 0, _LONGEST_KEY)
        if end < 0:
            return len(text) >= _LONGEST_KEY and self._fail()
        key = text[:end].strip()
        if key.startswith(quote) and key.endswith(quote):
            key = key.removeprefix(quote).removesuffix(quote)
        elif _QUOTED.fullmatch(key):
            key = key[1:-1]
        if find_first(key, (*self._ends, quote)) is not None:
            return self._fail()
        return self._consume(end + 1, f'"{json_string(key)}": ', _State.VALUE)

    def _read_value(self) -> bool:
        text = self._buffer
        if text[0] == "]" and self._state is _State.FIRST_ELEMENT:
            return self._close("]")
        if text[0] == "{" or (text[0] == "[" and self._brackets):
            self._brackets += text[0]
            return self._consume(
                1, text[0], _State.FIRST_KEY if text[0] == "{" else _State.FIRST_ELEMENT
            )
        if text.startswith(self._quote):
            return self._consume(len(self._quote), '"', _State.STRING)
        if may_begin(text, (self._quote,)):
            return False
        if text[0] == '"':
            quoted = _QUOTED.match(text)
            if quoted is None:
                return False
            return self._consume(quoted.end(), _quoted(quoted[0]), _State.AFTER)
        found = find_first(text, self._ends)
        if found is None:
            return False
        at, end = found
        if at == 0 or end not in _ENDS:
            return self._fail()
        return self._consume(at, json_value(text[:at], _ANY_TYPE), _State.AFTER)

    def _read_after(self) -> bool:
        char = self._buffer[0]
        if char in "]}":
            return self._close(char)
        if char == ",":
            is_object = self._brackets[-1] == "{"
            return self._consume(1, ", ", _State.KEY if is_object else _State.VALUE)
        return self._fail()

    def _close(self, bracket: str) -> bool:
        if self._brackets[-1] + bracket not in ("{}", "[]"):
            return self._fail()
        self._brackets = self._brackets[:-1]
        self._consume(1, bracket, _State.AFTER)
        if not self._brackets:
            self.rest = self._buffer
        return True


def _quoted(source: str) -> str:
    """Return a JSON string for a string in JSON notation, even if its escapes are invalid."""
    return source if decode_string(source) is not None else f'"{json_string(source[1:-1])}"'
