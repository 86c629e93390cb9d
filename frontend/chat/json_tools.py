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
    """The format `opening [ {"name": ..., "arguments": {...}}, ... ] closing`; brackets and commas are optional."""

    openings: tuple[str, ...]
    closing: str | None = None
    bare: bool = False
    """True if a text that starts with an object is a call without an opening marker."""
    names_first: bool = False
    """True if a call may also be `opening name {arguments}`."""
    needs_arguments: bool = False
    """True if an object without arguments does not count as a call."""
    new_id: Callable[[], str] = openai_call_id


class _State(Enum):
    START = auto()
    """The text is only whitespace so far."""
    TEXT = auto()
    CALLS = auto()
    """The parser is after an opening, between calls."""
    NAME = auto()
    OBJECT = auto()
    REST = auto()
    """The parser is after a call, in unexpected text, which is ignored up to the closing marker."""


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
        self._raw = ""  # Consumed text, which becomes content if it turns out not to be a call.
        self._num_calls = 0
        self._calls_in_block = 0
        self._scanner = JsonObjectScanner(self.marks)
        self._is_arguments = False  # Whether the scanner's object is the arguments, not the call.
        self._num_emitted: int | None = None
        """Emitted characters of the current call's arguments; None before the call is emitted."""
        self._delta = ToolDelta()

    def feed(self, text: str) -> ToolDelta:
        """Return the calls and the content that the next piece of text adds."""
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
        """Return the held-back text at the end."""
        held = self._buffer
        self._delta = ToolDelta()
        if self._state is _State.OBJECT:
            held = self._scanner.text
            self._scanner.position = len(held)
            if self._num_emitted is not None:
                self._emit_arguments()
        if self._state in (_State.CALLS, _State.NAME, _State.OBJECT):
            held = "" if self._calls_in_block else self._raw + held
        elif self._state is _State.REST or (self._num_calls and not held.strip()):
            held = ""
        self._buffer = self._raw = ""
        self._state = _State.TEXT
        self._delta.content = held
        return self._delta

    # Each `_read_...` step consumes text or changes the state. It returns False if it needs more text for either.

    def _consume(self, count: int) -> str:
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
            self._delta.content += self._consume(start_of_held(self._buffer, self.format.openings))
            return False
        at, marker = opening
        spaces = at - len(self._buffer[:at].rstrip())
        self._delta.content += self._consume(at - spaces)
        self._open_block(self._consume(spaces + len(marker)))
        return True

    def _open_block(self, raw: str) -> None:
        self._raw = raw
        self._calls_in_block = 0
        self._state = _State.CALLS

    def _read_between_calls(self) -> bool:
        text, closing = self._buffer, self.format.closing
        if closing and text.startswith(closing):
            self._raw += self._consume(len(closing))
            self._close_block()
        elif text.startswith(self.format.openings):
            self._close_block()
        elif may_begin(text, self.marks):
            return False
        elif text[0] in "[,; \t\r\n":
            self._raw += self._consume(1)
        elif text[0] == "{":
            self._start_object(is_arguments=False)
        elif text[0] == "]":
            self._raw += self._consume(1)
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
        self._raw += self._consume(brace)
        self._start_object(is_arguments=True)
        self._emit_call(name["name"])
        return True

    def _start_object(self, *, is_arguments: bool) -> None:
        self._scanner = JsonObjectScanner(self.marks)
        self._is_arguments = is_arguments
        self._num_emitted = None
        self._state = _State.OBJECT

    def _read_object(self) -> bool:
        scanner = self._scanner
        scanner.feed(self._consume(len(self._buffer)))
        if self._num_emitted is None and (name := self._name()) is not None:
            self._emit_call(name)
        if self._num_emitted is not None:
            self._emit_arguments()
        if scanner.end is None and not scanner.failed:
            return False
        end = scanner.position
        self._buffer = scanner.text[end:]
        if self._num_emitted is None:
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

    def _emit_call(self, name: str) -> None:
        self._delta.tool_calls.append(ToolCallDelta(self._num_calls, self.new_id(), name, ""))
        self._num_calls += 1
        self._calls_in_block += 1
        self._num_emitted = 0

    def _emit_arguments(self) -> None:
        arguments = self._arguments()
        piece = arguments[self._num_emitted :]
        if piece:
            self._num_emitted = len(arguments)
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
        if value.startswith('"'):  # A JSON string that contains the arguments as JSON.
            decoded = decode_string(value)
            value = value if decoded is None else decoded
        return "{}" if value in ("null", "") else value

    def _read_rest(self) -> bool:
        found = find_first(self._buffer, self.marks)
        if found is None:
            self._consume(start_of_held(self._buffer, self.marks))
            return False
        at, marker = found
        self._consume(at + (len(marker) if marker == self.format.closing else 0))
        self._state = _State.TEXT
        return True


def hermes() -> JsonToolParser:
    """Return a parser for Hermes and Qwen models."""
    return JsonToolParser(JsonFormat(("<tool_call>",), "</tool_call>"))


def granite() -> JsonToolParser:
    """Return a parser for Granite models."""
    return JsonToolParser(JsonFormat(("<|tool_call|>", "<tool_call>"), "</tool_call>"))


def llama3_json() -> JsonToolParser:
    """Return a parser for Llama 3 and 4 models that write JSON."""
    return JsonToolParser(JsonFormat(("<|python_tag|>",), bare=True, needs_arguments=True))


def mistral() -> JsonToolParser:
    """Return a parser for Mistral models."""
    return JsonToolParser(JsonFormat(("[TOOL_CALLS]",), names_first=True, new_id=mistral_call_id))
