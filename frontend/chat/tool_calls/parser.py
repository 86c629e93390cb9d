"""Parse the tool calls in a text."""

from collections.abc import Mapping
from enum import IntEnum, auto
from typing import ClassVar

from ..held_text import find_first, may_begin, start_of_held
from .syntax import CallFormat, CallSyntax
from .tools import CallIds, CallReader, Parameters, ToolCallDelta, ToolDelta


class _State(IntEnum):
    START = auto()
    """The text is only whitespace so far."""
    TEXT = auto()
    BLOCK = auto()
    """The parser is in a block, between calls."""
    CALL = auto()
    BROKEN = auto()
    """The parser is after an invalid call."""
    REST = auto()
    """The parser is after a call, in unexpected text. This text is ignored up to the next marker."""


class CallParser:
    """Parses the calls of one text in `format`. `functions` maps names of functions to their parameters.

    `call_ids` are the IDs of calls to which the model gives none; None creates random IDs.

    A call is emitted once it is certain to be one. Text after an opening marker that is not a call becomes content.
    Whitespace before a call is dropped unless it is between two pieces of content.
    """

    def __init__(
        self,
        format: CallFormat,
        functions: Mapping[str, Parameters] | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        self.format = format
        self._call_ids = call_ids or CallIds(format.new_id)
        self._functions = functions or {}
        self._openings = format.openings_with(self._functions)
        self._state = _State.START if format.bare else _State.TEXT
        self._buffer = ""
        # Consumed text, which becomes content if it turns out not to be a call.
        self._raw: list[str] = []
        self._has_content = False
        self._spaces = ""  # Whitespace after content and before calls. It becomes content if more content follows.
        self._num_calls = 0
        self._calls_in_block = 0
        self._is_bare = False  # Whether the block has no opening marker.
        self._reader: CallReader | None = None
        self._is_emitted = False  # Whether the current call was emitted.
        self._delta = ToolDelta()

    def feed(self, text: str) -> ToolDelta:
        """Return the calls and the content that the next piece of text adds."""
        self._buffer += text
        self._delta = ToolDelta()
        while self._buffer and self._steps[self._state](self):
            pass
        return self._delta

    def finish(self) -> ToolDelta:
        """Return the held-back text at the end."""
        self._delta = ToolDelta()
        held = self._buffer
        if self._reader is not None and self._is_emitted:
            self._emit_arguments(self._reader.finish())
        if self._state in (_State.BLOCK, _State.CALL, _State.BROKEN):
            held = "" if self._calls_in_block else "".join(self._raw) + held
        elif self._state is _State.REST or (self._num_calls and not held.strip()):
            held = ""
        self._buffer = ""
        self._raw.clear()
        self._state = _State.TEXT
        self._reader = None
        self._add_content(held)
        return self._delta

    # Each `_read_...` step consumes text or changes the state. It returns False if it needs more text to do so.

    def _consume(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _add_content(self, text: str) -> None:
        if text:
            self._delta.content += self._spaces + text
            self._spaces = ""
            self._has_content = True

    def _read_start(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] in "{[":
            self._open_block("", is_bare=True)
        else:
            self._state = _State.TEXT
        return True

    def _read_text(self) -> bool:
        openings = self._openings
        found = find_first(self._buffer, openings)
        if found is None:
            self._add_content(self._consume(start_of_held(self._buffer, openings)))
            return False
        at, opening = found
        spaces = at - len(self._buffer[:at].rstrip())
        self._add_content(self._consume(at - spaces))
        is_call = any(syntax.before == opening for syntax in self.format.calls)
        if is_call or opening not in self.format.openings:
            opening = ""  # The model omitted the opening of the block.
        self._open_block(self._consume(spaces + len(opening)), is_bare=not opening)
        return True

    def _open_block(self, raw: str, *, is_bare: bool) -> None:
        self._raw[:] = [raw]
        self._calls_in_block = 0
        self._is_bare = is_bare
        self._state = _State.BLOCK

    def _read_block(self) -> bool:
        format, text = self.format, self._buffer
        ignored = next((mark for mark in format.ignored if text.startswith(mark)), None)
        if format.closing and text.startswith(format.closing):
            self._raw.append(self._consume(len(format.closing)))
            self._close_block()
        elif ignored is not None:
            self._raw.append(self._consume(len(ignored)))
        elif any(syntax.before and text.startswith(syntax.before) for syntax in format.calls):
            self._start_call()
        elif text.startswith(format.openings):
            self._close_block()
        elif may_begin(text, format.markers):
            return False
        elif text[0] in "[,; \t\r\n":
            self._raw.append(self._consume(1))
        elif text[0] == "]":
            self._raw.append(self._consume(1))
            if format.closing is None or self._is_bare:
                self._close_block()
        else:
            self._start_call()
        return True

    def _close_block(self) -> None:
        self._state = _State.TEXT
        if not self._calls_in_block:
            self._give_up()

    def _give_up(self) -> None:
        """Treat the consumed text as content; inside a block with calls, ignore it."""
        if self._calls_in_block and self.format.closing and not self._is_bare:
            self._state = _State.REST
        else:
            self._add_content("".join(self._raw))
            self._state = _State.TEXT
        self._raw.clear()

    def _start_call(self) -> None:
        syntax = self._find_syntax()
        if syntax is None:
            self._give_up()
            return
        self._raw.append(self._consume(len(syntax.before)))
        self._reader = syntax.reader(self.format.markers, self._functions)
        self._is_emitted = False
        self._state = _State.CALL

    def _find_syntax(self) -> CallSyntax | None:
        for syntax in self.format.calls:
            if self._buffer.startswith(syntax.before or syntax.first) and not (
                syntax.is_only_call and self._calls_in_block
            ):
                return syntax
        return None

    def _read_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        piece = self._consume(len(self._buffer))
        arguments = reader.feed(piece)
        if not self._is_emitted and reader.name is None:
            self._raw.append(piece)
        elif not self._is_emitted and reader.name is not None:
            self._emit_call(reader.name, reader.call_id)
        if self._is_emitted:
            self._emit_arguments(arguments)
        if reader.rest is None:
            return False
        self._reader = None
        self._buffer = reader.rest
        if self._is_emitted:
            self._raw.clear()
        else:
            raw = "".join(self._raw)
            self._raw[:] = [raw[: len(raw) - len(reader.rest)]]
        if not self._is_emitted:
            self._give_up()
        else:
            self._state = _State.BROKEN if reader.failed else _State.BLOCK
        return True

    def _read_broken(self) -> bool:
        if self._buffer.startswith(self.format.markers):
            self._state = _State.BLOCK
        elif may_begin(self._buffer, self.format.markers):
            return False
        else:
            self._give_up()
        return True

    def _emit_call(self, name: str, call_id: str | None) -> None:
        self._delta.tool_calls.append(
            ToolCallDelta(self._num_calls, self._call_ids.next_id(name, call_id), name, "")
        )
        if self._has_content and not self._calls_in_block:
            text = "".join(self._raw)
            self._spaces += text[: len(text) - len(text.lstrip())]
        self._num_calls += 1
        self._calls_in_block += 1
        self._is_emitted = True

    def _emit_arguments(self, piece: str) -> None:
        if piece:
            self._delta.tool_calls.append(ToolCallDelta(self._num_calls - 1, arguments=piece))

    def _read_rest(self) -> bool:
        markers = self.format.markers
        found = find_first(self._buffer, markers)
        if found is None:
            self._consume(start_of_held(self._buffer, markers))
            return False
        at, marker = found
        self._consume(at)
        if any(marker == syntax.before for syntax in self.format.calls):
            self._state = _State.BLOCK
        elif marker == self.format.closing or marker in self.format.ignored:
            self._consume(len(marker))
            if marker == self.format.closing:
                self._state = _State.TEXT
        else:
            self._state = _State.TEXT
        return True

    _steps: ClassVar = {
        _State.START: _read_start,
        _State.TEXT: _read_text,
        _State.BLOCK: _read_block,
        _State.CALL: _read_call,
        _State.BROKEN: _read_broken,
        _State.REST: _read_rest,
    }
