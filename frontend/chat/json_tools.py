"""Parses tool calls that are JSON objects between markers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from .held_text import find_first, may_begin, start_of_held
from .json_scanner import JsonObjectScanner, decode_string
from .tools import ToolCallDelta, ToolDelta, mistral_call_id, openai_call_id

_ARGUMENTS = ("arguments", "parameters")
_BEFORE_ARGUMENTS = re.compile(
    r"\s*(?P<name>[\w.\-/:]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?"
)
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """`opening [ {"name": ..., "arguments": {...}}, ... ] closing`, brackets and commas optional."""

    openings: tuple[str, ...]
    closing: str | None = None
    bare: bool = False
    """Whether a text that starts with an object is a call without an opening marker."""
    names_first: bool = False
    """Whether a call may also be `opening name {arguments}`."""
    needs_arguments: bool = False
    """Whether an object without arguments does not count as a call."""
    new_id: Callable[[], str] = openai_call_id


class _State(Enum):
    START = auto()
    """Nothing but whitespace so far."""
    TEXT = auto()
    CALLS = auto()
    """After an opening, between calls."""
    NAME = auto()
    OBJECT = auto()
    REST = auto()
    """After a call, in what should not be there: ignored up to the closing."""


class JsonToolParser:
    """Parses the calls of one text in `format`.

    A call is emitted once its name and the start of its arguments are known. Text after an opening marker that is
    not a call becomes content. Whitespace next to a call is dropped.
    """

    def __init__(self, format: JsonFormat) -> None:
        self.format = format
        self.new_id = format.new_id
        self.marks = format.openings + ((format.closing,) if format.closing else ())
        self._state = _State.START if format.bare else _State.TEXT
        self._buffer = ""
        self._raw = ""  # taken off the buffer, to give back if no call comes of it
        self._num_calls = 0
        self._calls_in_block = 0
        self._scanner = JsonObjectScanner(self.marks)
        self._is_arguments = False  # the scanner's object is the arguments, not the call
        self._given_chars: int | None = None  # of the scanner's call; None before it is given out
        self._delta = ToolDelta()

    def feed(self, text: str) -> ToolDelta:
        self._buffer += text
        self._delta = ToolDelta()
        steps = {
            _State.START: self._read_start,
            _State.TEXT: self._read_text,
            _State.CALLS: self._read_between_calls,
            _State.NAME: self._read_name,
            _State.OBJECT: self._read_object,
            _State.REST: self._read_rest,
        }
        while self._buffer and steps[self._state]():
            pass
        return self._delta

    def finish(self) -> ToolDelta:
        held = self._buffer
        self._delta = ToolDelta()
        if self._state is _State.OBJECT:
            held = self._scanner.text
            self._scanner.position = len(held)
            if self._given_chars is not None:
                self._give_arguments()
        if self._state in (_State.CALLS, _State.NAME, _State.OBJECT):
            held = "" if self._calls_in_block else self._raw + held
        elif self._state is _State.REST or (self._num_calls and not held.strip()):
            held = ""
        self._buffer = self._raw = ""
        self._state = _State.TEXT
        self._delta.content = held
        return self._delta

    # Each step takes something off the buffer or goes to another state; it is False if it can do
    # neither before more text comes.

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _read_start(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] in "{[":
            self._open_block("")
        else:
            self._state = _State.TEXT
        return True

    def _read_text(self) -> bool:
        opening = find_first(self._buffer, self.format.openings)
        if opening is None:
            self._delta.content += self._take(start_of_held(self._buffer, self.format.openings))
            return False
        at, marker = opening
        spaces = at - len(self._buffer[:at].rstrip())
        self._delta.content += self._take(at - spaces)
        self._open_block(self._take(spaces + len(marker)))
        return True

    def _open_block(self, raw: str) -> None:
        self._raw = raw
        self._calls_in_block = 0
        self._state = _State.CALLS

    def _read_between_calls(self) -> bool:
        text, closing = self._buffer, self.format.closing
        if closing and text.startswith(closing):
            self._raw += self._take(len(closing))
            self._close_block()
        elif text.startswith(self.format.openings):
            self._close_block()
        elif may_begin(text, self.marks):
            return False
        elif text[0] in "[,; \t\r\n":
            self._raw += self._take(1)
        elif text[0] == "{":
            self._start_object(is_arguments=False)
        elif text[0] == "]":
            self._raw += self._take(1)
            if closing is None:
                self._close_block()
        elif self.format.names_first and not self._calls_in_block:
            self._state = _State.NAME
        else:
            self._give_up()
        return True

    def _close_block(self) -> None:
        self._state = _State.TEXT
        if not self._calls_in_block:
            self._give_up()

    def _give_up(self) -> None:
        """Treat the consumed text as content, or drop it inside a block with calls."""
        if self._calls_in_block and self.format.closing:
            self._state = _State.REST
        else:
            self._delta.content += self._raw
            self._state = _State.TEXT
        self._raw = ""

    def _read_name(self) -> bool:
        brace = self._buffer.find("{", 0, _LONGEST_NAME)
        if brace < 0 and len(self._buffer) < _LONGEST_NAME:
            return False
        name = _BEFORE_ARGUMENTS.fullmatch(self._buffer[:brace]) if brace > 0 else None
        if name is None:
            self._give_up()
            return True
        self._raw += self._take(brace)
        self._start_object(is_arguments=True)
        self._give_out(name["name"])
        return True

    def _start_object(self, *, is_arguments: bool) -> None:
        self._scanner = JsonObjectScanner(self.marks)
        self._is_arguments = is_arguments
        self._given_chars = None
        self._state = _State.OBJECT

    def _read_object(self) -> bool:
        scanner = self._scanner
        scanner.feed(self._take(len(self._buffer)))
        if self._given_chars is None and (name := self._name()) is not None:
            self._give_out(name)
        if self._given_chars is not None:
            self._give_arguments()
        if scanner.end is None and not scanner.failed:
            return False
        end = scanner.position
        self._buffer = scanner.text[end:]
        if self._given_chars is None:
            self._raw += scanner.text[:end]
            self._give_up()
        else:
            self._raw = ""
            self._state = _State.CALLS
            if scanner.failed:
                self._give_up()
        return True

    def _name(self) -> str | None:
        """Return the name of the current call, once it is certain to be one."""
        scanner = self._scanner
        name = decode_string(scanner.members.get("name", ""))
        if not name:
            return None
        has_arguments = not scanner.members.keys().isdisjoint(_ARGUMENTS) or (
            scanner.open_key in _ARGUMENTS and scanner.open_start is not None
        )
        ended = scanner.end is not None and not self.format.needs_arguments
        return name if has_arguments or ended else None

    def _give_out(self, name: str) -> None:
        self._delta.tool_calls.append(ToolCallDelta(self._num_calls, self.new_id(), name, ""))
        self._num_calls += 1
        self._calls_in_block += 1
        self._given_chars = 0

    def _give_arguments(self) -> None:
        arguments = self._arguments()
        piece = arguments[self._given_chars :]
        if piece:
            self._given_chars = len(arguments)
            self._delta.tool_calls.append(ToolCallDelta(self._num_calls - 1, arguments=piece))

    def _arguments(self) -> str:
        """Return the available part of the current call's arguments."""
        scanner = self._scanner
        if self._is_arguments:
            return scanner.text[: scanner.position]
        value = next((v for k, v in scanner.members.items() if k in _ARGUMENTS), None)
        if value is None:
            if scanner.open_start is None:
                return "{}"
            return scanner.text[scanner.open_start : scanner.position]
        if value.startswith('"'):  # JSON written as a string of JSON
            decoded = decode_string(value)
            value = value if decoded is None else decoded
        return "{}" if value in ("null", "") else value

    def _read_rest(self) -> bool:
        found = find_first(self._buffer, self.marks)
        if found is None:
            self._take(start_of_held(self._buffer, self.marks))
            return False
        at, marker = found
        self._take(at + (len(marker) if marker == self.format.closing else 0))
        self._state = _State.TEXT
        return True


def hermes() -> JsonToolParser:
    return JsonToolParser(JsonFormat(("<tool_call>",), "</tool_call>"))


def granite() -> JsonToolParser:
    return JsonToolParser(JsonFormat(("<|tool_call|>", "<tool_call>"), "</tool_call>"))


def llama3_json() -> JsonToolParser:
    return JsonToolParser(JsonFormat(("<|python_tag|>",), bare=True, needs_arguments=True))


def mistral() -> JsonToolParser:
    return JsonToolParser(JsonFormat(("[TOOL_CALLS]",), names_first=True, new_id=mistral_call_id))
