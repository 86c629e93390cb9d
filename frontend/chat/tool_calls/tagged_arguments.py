"""Read arguments that are written one by one between tags, as in XML."""

from collections.abc import Mapping
from enum import Enum, auto

import msgspec

from ..held_text import find_first, may_begin, start_of_marker
from .json_calls import JsonArguments
from .stepwise_arguments import StepwiseArguments
from .tools import Parameters
from .values import json_string, json_value, types_of

_LONGEST_KEY = 512

_KEYS_OF_ALL = ("arguments", "input")
"""Keys under which models may write one JSON object of all arguments, if no parameter has this name."""


class Tags(msgspec.Struct, frozen=True):
    """The form `start (key_before KEY key_after VALUE value_end)* end`, with whitespace between the tags.

    Values of string parameters are plain text; values of all other parameters are JSON.

    Attributes:
        value_before: A tag between `key_after` and the value.
        end: The end of the arguments; "" if only a marker of the format ends them.
        empty: The text in place of `start` and `end` if there are no arguments; "" if models always write both.
        has_newlines: True if a line break separates each value from its tags.
        typed: Attribute after a key -> whether it declares the value to be a string.
        is_escaped: True if keys have `&quot;` and `&amp;` in place of these characters.
        wrapping: Texts that models may write around a value, between its tags.
        may_be_json: True if models may write one JSON object in place of all keys and values, or under one key.
    """

    key_before: str
    key_after: str
    value_end: str
    start: str = ""
    value_before: str = ""
    end: str = ""
    empty: str = ""
    has_newlines: bool = False
    typed: tuple[tuple[str, bool], ...] = ()
    is_escaped: bool = False
    may_be_json: bool = False
    wrapping: tuple[str, str] = ("", "")


class _State(Enum):
    START = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE_TAG = auto()
    VALUE_START = auto()
    VALUE = auto()
    JSON = auto()
    JSON_END = auto()


class TaggedArguments(StepwiseArguments):
    """Reads arguments between `tags`. Strings are emitted as they arrive, other values once they are complete.

    `markers` end arguments that are still open. The end tag of a value counts only if another tag follows, so that
    values may contain the end tag's text. If a line break separates values from tags, models may omit the end tag.
    """

    def __init__(self, tags: Tags, markers: tuple[str, ...], parameters: Parameters) -> None:
        super().__init__()
        self._tags = tags
        self._markers = markers
        self._after_value = (tags.key_before, *filter(None, (tags.end,)), *markers)
        self._parameters = parameters
        self._unclosed = _texts_after_unclosed_values(tags, markers, parameters)
        self._position = 0  # how far an open value has been searched for its end
        self._state = _State.START
        self._types: frozenset[str] = frozenset()
        self._is_string = False
        self._is_empty = True
        self._value_end = tags.value_end
        self._object: JsonArguments | None = None  # Set if the arguments are one JSON object.
        self._start_of_value = ""  # The held-back JSON before a value.
        self._may_be_all = False  # Whether the key may be that of all arguments.
        self._steps = {
            _State.START: self._read_start,
            _State.BETWEEN: self._read_between,
            _State.KEY: self._read_key,
            _State.VALUE_TAG: self._read_value_tag,
            _State.VALUE_START: self._read_value_start,
            _State.VALUE: self._read_value,
            _State.JSON: self._read_json,
            _State.JSON_END: self._read_json_end,
        }

    def _step(self) -> bool:
        return self._steps[self._state]()

    def _append_held_back(self) -> None:
        if self._object is not None and self._object.rest is None:
            self._json.append(self._object.finish())
        # The value ends only if its end tag was read.
        if self._state in (_State.VALUE_START, _State.VALUE):
            before, end, after = self._buffer.rpartition(self._value_end)
            if end and may_begin(after.lstrip(), self._after_value):
                self._close_value(before)
            elif self._is_string:
                self._json.append(json_string(self._buffer))

    def _end(self, num_consumed: int, *, failed: bool = False) -> bool:
        if self._object is None:
            self._json.append("{}" if self._is_empty else "}")
        self.rest = self._buffer[num_consumed:]
        self.failed = failed
        return False

    def _skip(self, tag: str, then: _State) -> bool:
        """Skip whitespace and a tag that must follow, then enter the state `then`.

        Return False if more text is needed.
        """
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(tag):
            self._buffer = self._buffer.removeprefix(tag)
            self._state = then
            return True
        return not may_begin(self._buffer, (tag,)) and self._end(0, failed=True)

    def _read_start(self) -> bool:
        empty = self._tags.empty
        if empty and self._buffer.startswith(empty):
            return self._end(len(empty))
        return self._skip(self._tags.start, _State.BETWEEN)

    def _read_between(self) -> bool:
        tags, text = self._tags, self._buffer.lstrip()
        self._buffer = text
        if text.startswith(tags.key_before):
            self._buffer = text.removeprefix(tags.key_before)
            self._state = _State.KEY
            return True
        if tags.may_be_json and self._is_empty and text.startswith("{"):
            return self._start_json()
        return self._read_end(self._after_value)

    def _read_end(self, allowed: tuple[str, ...]) -> bool:
        """End the arguments at a tag, at a marker, or at text that begins none of the `allowed` ones."""
        tags, text = self._tags, self._buffer
        if tags.end and text.startswith(tags.end):
            return self._end(len(tags.end))
        if text.startswith(self._markers):
            return self._end(0)
        return not may_begin(text, allowed) and self._end(0, failed=True)

    def _start_json(self) -> bool:
        self._object = JsonArguments(self._markers)
        self._state = _State.JSON
        return True

    def _read_json(self) -> bool:
        assert self._object is not None
        self._json.append(self._object.feed(self._buffer))
        self._buffer = self._object.rest or ""
        if self._object.rest is None:
            return False
        self._state = _State.JSON_END
        return True

    def _read_json_end(self) -> bool:
        self._buffer = self._buffer.lstrip()
        allowed = (*filter(None, (self._tags.end,)), *self._markers)
        if self._may_be_all:
            allowed = (self._tags.value_end, *allowed)
            if self._buffer.startswith(self._tags.value_end):
                self._buffer = self._buffer.removeprefix(self._tags.value_end).lstrip()
                self._may_be_all = False
                return bool(self._buffer)
        return self._read_end(allowed)

    def _read_key(self) -> bool:
        key, end, rest = self._buffer.partition(self._tags.key_after)
        if not end or len(key) > _LONGEST_KEY:
            too_long = len(self._buffer) > _LONGEST_KEY + len(self._tags.key_after)
            return too_long and self._end(0, failed=True)
        is_string = None
        for attribute, says_string in self._tags.typed:
            if key.endswith(attribute):
                key, is_string = key.removesuffix(attribute), says_string
        key = key.strip()
        if self._tags.is_escaped:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        self._types = types_of(self._parameters, key)
        if is_string is False:
            self._types = self._types - {"string"}
        elif is_string and ("string" in self._types or not self._types):
            # Models also declare values to be strings whose schema allows no string.
            self._types = frozenset(("string",))
        self._is_string = self._types == {"string"}
        properties = self._parameters.get("properties")
        self._may_be_all = (
            self._tags.may_be_json
            and self._is_empty
            and key in _KEYS_OF_ALL
            and isinstance(properties, Mapping)
            and bool(properties)
            and key not in properties
        )
        self._start_of_value = f'{"{" if self._is_empty else ", "}"{json_string(key)}": '
        self._buffer = rest
        self._state = _State.VALUE_TAG
        return True

    def _read_value_tag(self) -> bool:
        if self._tags.value_before:
            return self._skip(self._tags.value_before, _State.VALUE_START)
        self._state = _State.VALUE_START
        return True

    def _read_value_start(self) -> bool:
        if self._may_be_all and (not self._buffer or self._buffer.startswith("{")):
            return bool(self._buffer) and self._start_json()
        self._may_be_all = False
        self._json.append(self._start_of_value)
        self._start_of_value = ""
        self._is_empty = False
        start, end = self._tags.wrapping
        is_partial = start.startswith(self._buffer) and self._buffer != start
        if not self._buffer or is_partial:
            return False
        is_wrapped = bool(start) and self._buffer.startswith(start)
        self._value_end = end + self._tags.value_end if is_wrapped else self._tags.value_end
        if is_wrapped:
            self._buffer = self._buffer.removeprefix(start)
        if self._tags.has_newlines:
            self._buffer = self._buffer.removeprefix("\n")
        if self._is_string:
            self._json.append('"')
        self._position = 0
        self._state = _State.VALUE
        return True

    def _read_value(self) -> bool:
        ends = (self._value_end, *self._unclosed)
        while (found := find_first(self._buffer, ends, self._position)) is not None:
            at, marker = found
            is_closed = marker == self._value_end
            after = self._buffer[at + (len(marker) if is_closed else 0) :].lstrip()
            if not is_closed or after.startswith(self._after_value):
                self._close_value(self._buffer[:at])
                self._buffer = after
                self._state = _State.BETWEEN
                return True
            if may_begin(after, self._after_value):
                self._emit_value(at)
                return False
            self._position = at + 1
        self._emit_value(max(self._position, start_of_marker(self._buffer, ends)))
        return False

    def _emit_value(self, end: int) -> None:
        """Emit the value up to `end`. The line break before the end tag is held back."""
        self._position = end
        if self._is_string:
            if self._tags.has_newlines and self._buffer[end - 1 : end] == "\n":
                end -= 1
            self._json.append(json_string(self._buffer[:end]))
            self._buffer = self._buffer[end:]
            self._position -= end

    def _close_value(self, text: str) -> None:
        if self._tags.has_newlines:
            text = text.removesuffix("\n")
        if self._is_string:
            self._json.append(f'{json_string(text)}"')
        else:
            self._json.append(json_value(text, self._types))


def _texts_after_unclosed_values(
    tags: Tags, markers: tuple[str, ...], parameters: Parameters
) -> tuple[str, ...]:
    """Return the texts that end a value without an end tag: the tag of another parameter, and the end of the call."""
    if not tags.has_newlines:
        return ()
    properties = parameters.get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return (
        *(f"\n{tags.key_before}{name}{tags.key_after}" for name in names),
        *(f"\n{tags.end}\n{marker}" for marker in markers),
    )
