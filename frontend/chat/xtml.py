"""Parse the channels of Kimi K3's answers (the XTML format).

An answer is a sequence of channels, `<|open|>NAME<|sep|>TEXT<|close|>NAME<|sep|>`: first `think` (the reasoning), then
`response`, then `tools` if there are calls. `<|close|>message<|sep|>` ends it. The tag that opens the first channel is
part of the prompt.
"""

import re
from typing import Final

from ...protocol.sampling_params import GrammarKind, StructuredOutput
from ..tokenizer.tokenizer import Tokenizer
from .channels import Channel, ChannelParser, constrain_after
from .reasoning import grammar_mark

_OPEN: Final = "<|open|>"
_CLOSE: Final = "<|close|>"
_SEP: Final = "<|sep|>"
_TAG: Final = re.compile(r"<\|(?P<kind>open|close)\|>\s*(?P<name>\w+)[^<]*<\|sep\|>")
_OPENS_RESPONSE: Final = f"{_OPEN}response{_SEP}"
_OPENS_TOOLS: Final = f"{_OPEN}tools{_SEP}"
_CLOSES_THINK: Final = f"{_CLOSE}think{_SEP}"
_CLOSES_RESPONSE: Final = f"{_CLOSE}response{_SEP}"
_CLOSES_TOOLS: Final = f"{_CLOSE}tools{_SEP}"
_CLOSES_MESSAGE: Final = f"{_CLOSE}message{_SEP}"
_CHANNELS: Final = {
    "think": Channel.REASONING,
    "response": Channel.CONTENT,
    "tools": Channel.CALLS,
}
_ENDS: Final = {
    Channel.REASONING: (_CLOSES_THINK, _OPENS_RESPONSE, _OPENS_TOOLS),
    Channel.CONTENT: (_CLOSES_RESPONSE, _OPENS_TOOLS, _CLOSES_MESSAGE),
    Channel.CALLS: (_CLOSES_TOOLS,),
}


class XtmlParser(ChannelParser):
    """Splits one text of Kimi K3, fed in pieces, into reasoning and content.

    The channel with calls becomes content, with its tags. Models may omit the end of a channel before another one.
    """

    marks = (_OPEN, _CLOSE, _SEP)
    begins_message = f"{_OPEN}message"
    header_starts = (_OPEN, _CLOSE)
    header_end = _SEP
    ends = _ENDS
    calls_end = _CLOSES_TOOLS
    reasoning_ends = _ENDS[Channel.REASONING]

    @property
    def answer_start(self) -> str:
        """The tags that begin the response, so that the answer follows the prompt without reasoning."""
        if self._first is Channel.CONTENT:
            return ""
        return (_CLOSES_THINK if self._first is Channel.REASONING else "") + _OPENS_RESPONSE

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the response.

        A Lark grammar may describe calls, whose channel comes after the response. So with one, a response is optional.
        """
        is_grammar = constraint.kind is GrammarKind.LARK
        if self._first is Channel.CONTENT and not is_grammar:
            return constraint

        def tag(mark: str, name: str) -> str:
            return f'{grammar_mark(tokenizer, mark)} "{name}" {grammar_mark(tokenizer, _SEP)}'

        close_response, think = tag(_CLOSE, "response"), "to_end_of_think"
        if self._first is not Channel.REASONING:
            think = f"({tag(_OPEN, 'think')} {think})?"
        begin = f"{think} {tag(_OPEN, 'response')}"
        if is_grammar:
            begin = f"{think} ({tag(_OPEN, 'response')} to_end_of_response)?"
            if self._first is Channel.CONTENT:
                begin = "to_end_of_response?"
        lazy = "" if tokenizer.token_to_id(_CLOSE) is not None else "[lazy]"
        return constrain_after(
            constraint,
            f"start: {begin} @answer ({close_response})? ({tag(_CLOSE, 'message')})?",
            f"to_end_of_think{lazy}: TEXT {tag(_CLOSE, 'think')}",
            f"to_end_of_response{lazy}: TEXT {close_response}",
        )

    def _apply_header(self, header: str) -> None:
        tag = _TAG.fullmatch(header)
        if tag is None:
            self._buffer = header + self._buffer
            self._open(Channel.CONTENT)
        elif tag["kind"] == "open" and (channel := _CHANNELS.get(tag["name"])) is not None:
            self._open(channel)
            if channel is Channel.CALLS:
                self._emit(_OPENS_TOOLS)
