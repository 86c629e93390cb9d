"""Parse the channels of Kimi K3's answers (the XTML format).

An answer is a sequence of channels, `<|open|>NAME<|sep|>TEXT<|close|>NAME<|sep|>`: first `think` (the reasoning), then
`response`, then `tools` if there are calls. `<|close|>message<|sep|>` ends it. The tag that opens the first channel is
part of the prompt.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

import msgspec

from ...protocol.sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from ..tokenizer.tokenizer import Tokenizer
from .held_text import find_first, may_begin, start_of_marker
from .reasoning import ReasoningDelta, grammar_mark, has_special_tokens, num_tokens_before

_OPEN: Final = "<|open|>"
_CLOSE: Final = "<|close|>"
_SEP: Final = "<|sep|>"
_TAG: Final = re.compile(r"<\|(?P<kind>open|close)\|>\s*(?P<name>\w+)[^<]*<\|sep\|>")
_LONGEST_TAG: Final = 1024
_OPENS_RESPONSE: Final = f"{_OPEN}response{_SEP}"
_OPENS_TOOLS: Final = f"{_OPEN}tools{_SEP}"
_CLOSES_THINK: Final = f"{_CLOSE}think{_SEP}"
_CLOSES_RESPONSE: Final = f"{_CLOSE}response{_SEP}"
_CLOSES_TOOLS: Final = f"{_CLOSE}tools{_SEP}"
_CLOSES_MESSAGE: Final = f"{_CLOSE}message{_SEP}"


class _Channel(Enum):
    NONE = auto()
    """The parser is between channels."""
    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()


_CHANNELS: Final = {
    "think": _Channel.THINK,
    "response": _Channel.RESPONSE,
    "tools": _Channel.TOOLS,
}
_ENDS: Final = {
    _Channel.THINK: (_CLOSES_THINK, _OPENS_RESPONSE, _OPENS_TOOLS),
    _Channel.RESPONSE: (_CLOSES_RESPONSE, _OPENS_TOOLS, _CLOSES_MESSAGE),
    _Channel.TOOLS: (_CLOSES_TOOLS,),
}
"""Channel -> the tags that end it. Models may omit the end of a channel before another one."""


class XtmlParser:
    """Splits one text, fed in pieces, into reasoning and content. `prompt` is the rendered chat.

    The channel with calls becomes content, with its tags, for the tool parser. Text outside of all channels is content.
    """

    marks: tuple[str, ...] = (_OPEN, _CLOSE, _SEP)

    def __init__(self, prompt: str = "", *, constrained: bool = False) -> None:
        self._buffer = ""
        self._channel = _Channel.NONE
        self._delta = ReasoningDelta()
        _, message, tail = prompt.rpartition(f"{_OPEN}message")
        if message:
            self.feed(message + tail)
        self._first = self._channel

    def feed(self, text: str) -> ReasoningDelta:
        """Return the changes to the message that the next piece of text causes."""
        self._buffer += text
        self._delta = ReasoningDelta()
        while self._buffer and self._step():
            pass
        return self._delta

    def finish(self) -> ReasoningDelta:
        """Return the held-back text at the end. An incomplete tag, or whitespace, between channels is dropped."""
        self._delta = ReasoningDelta()
        rest = self._buffer.strip()
        if self._channel is not _Channel.NONE or (rest and not rest.startswith(self.marks)):
            self._emit(self._buffer)
        self._buffer = ""
        return self._delta

    @property
    def answer_start(self) -> str:
        """The tags that begin the response, so that the answer follows the prompt without reasoning."""
        if self._first is _Channel.RESPONSE:
            return ""
        return (_CLOSES_THINK if self._first is _Channel.THINK else "") + _OPENS_RESPONSE

    def has_special_marks(self, tokenizer: Tokenizer) -> bool:
        """Return whether the markers are special tokens, so that a text without special tokens lacks them."""
        return has_special_tokens(self.marks, tokenizer)

    def can_limit(self, tokenizer: Tokenizer) -> bool:
        """Return False: reasoning cannot be cut at a token limit, because several tokens must follow its end."""
        return False

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the response.

        A Lark grammar may describe calls, whose channel comes after the response. So with one, a response is optional.
        """
        is_grammar = constraint.kind is GrammarKind.LARK
        if self._first is _Channel.RESPONSE and not is_grammar:
            return constraint

        def tag(mark: str, name: str) -> str:
            return f'{grammar_mark(tokenizer, mark)} "{name}" {grammar_mark(tokenizer, _SEP)}'

        close_response, think = tag(_CLOSE, "response"), "to_end_of_think"
        if self._first is not _Channel.THINK:
            think = f"({tag(_OPEN, 'think')} {think})?"
        begin = f"{think} {tag(_OPEN, 'response')}"
        if is_grammar:
            begin = f"{think} ({tag(_OPEN, 'response')} to_end_of_response)?"
            if self._first is _Channel.RESPONSE:
                begin = "to_end_of_response?"
        lazy = "" if tokenizer.token_to_id(_CLOSE) is not None else "[lazy]"
        grammar = "\n".join(
            [
                f"start: {begin} @answer ({close_response})? ({tag(_CLOSE, 'message')})?",
                f"to_end_of_think{lazy}: TEXT {tag(_CLOSE, 'think')}",
                f"to_end_of_response{lazy}: TEXT {close_response}",
                r"TEXT: /(.|\n)*/",
            ]
        )
        reasoning = FreeReasoning((), (), (), (), is_open=True, grammar=grammar)
        return msgspec.structs.replace(constraint, reasoning=reasoning)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of `token_ids` before the end of the reasoning."""
        if self._first is _Channel.RESPONSE:
            return 0
        return num_tokens_before(_ENDS[_Channel.THINK], token_ids, tokenizer)

    # Each step consumes text or changes the state. It returns False if it needs more text to do so.

    def _step(self) -> bool:
        return self._read_tag() if self._channel is _Channel.NONE else self._read_text()

    def _read_tag(self) -> bool:
        text = self._buffer.lstrip()
        if not text.startswith((_OPEN, _CLOSE)):
            if may_begin(text, (_OPEN, _CLOSE)):
                return False
            self._channel = _Channel.RESPONSE
            return True
        if _SEP not in text[:_LONGEST_TAG] and len(text) < _LONGEST_TAG:
            return False
        tag = _TAG.match(text, 0, _LONGEST_TAG)
        if tag is None:
            self._channel = _Channel.RESPONSE
            return True
        self._buffer = text[tag.end() :]
        if tag["kind"] == "open":
            self._channel = _CHANNELS.get(tag["name"], _Channel.NONE)
        if self._channel is _Channel.TOOLS:
            self._emit(_OPENS_TOOLS)
        return True

    def _read_text(self) -> bool:
        ends = _ENDS[self._channel]
        found = find_first(self._buffer, ends)
        at = start_of_marker(self._buffer, ends) if found is None else found[0]
        self._emit(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if found is None:
            return False
        if self._channel is _Channel.TOOLS:
            self._emit(_CLOSES_TOOLS)
        self._channel = _Channel.NONE
        return True

    def _emit(self, text: str) -> None:
        if self._channel is _Channel.THINK:
            self._delta.reasoning += text
        else:
            self._delta.content += text
