"""Parse the channels of Cohere's Command models from Command A on.

An answer is a sequence of `<|START_THINKING|>`, `<|START_RESPONSE|>` (Command A) or `<|START_TEXT|>` (its successors),
and `<|START_ACTION|>`, each with a text up to `<|END_...|>`. `<co>TEXT</co: 0:[1]>` cites a result of a tool.

Format: https://docs.cohere.com/docs/structured-outputs and vLLM's `cohere_command3` and `cohere_command4`.
"""

import re
from typing import Final

from ..held_text import start_of_marker
from .channels import Channel
from .delimited import DelimitedChannelParser

_START: Final = "<|START_"
_STARTS: Final = {
    "<|START_THINKING|>": Channel.REASONING,
    "<|START_RESPONSE|>": Channel.CONTENT,
    "<|START_TEXT|>": Channel.CONTENT,
    "<|START_ACTION|>": Channel.CALLS,
}
_MESSAGE: Final = "<|CHATBOT_TOKEN|>"
_CITATION: Final = re.compile(r"<co>|</co: [^<>]*>")
_OPEN_CITATION: Final = re.compile(r"</co: [^<>]*\Z")
_LONGEST_CITATION: Final = 1024
_ENDS: Final = {
    Channel.REASONING: ("<|END_THINKING|>", *_STARTS),
    Channel.CONTENT: ("<|END_RESPONSE|>", "<|END_TEXT|>", *_STARTS),
    Channel.CALLS: ("<|END_ACTION|>",),
}


class CohereParser(DelimitedChannelParser):
    """Splits one text of a Command model into reasoning and content. The marks of citations are dropped."""

    marks = (*_STARTS, *(start.replace("START", "END") for start in _STARTS))
    begins_message = _MESSAGE
    header_starts = (_MESSAGE, _START)
    header_end = "|>"
    ends = _ENDS
    calls_end = "<|END_ACTION|>"
    reasoning_ends = _ENDS[Channel.REASONING]
    think = ("<|START_THINKING|>", "<|END_THINKING|>")
    answer = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    trims_reasoning = True
    _held = ""

    def _apply_header(self, header: str) -> None:
        channel = _STARTS.get(header)
        if channel is not None:
            self._open(channel)
            if channel is Channel.CALLS:
                self._emit(header)

    def _emit(self, text: str) -> None:
        if self._channel is Channel.CALLS:
            super()._emit(text)
            return
        text = _CITATION.sub("", self._held + text)
        open_mark = _OPEN_CITATION.search(text, max(0, len(text) - _LONGEST_CITATION))
        end = start_of_marker(text, ("<co>", "</co: ")) if open_mark is None else open_mark.start()
        self._held = text[end:]
        super()._emit(text[:end])

    def _flush(self) -> None:
        held, self._held = self._held, ""
        super()._emit(held)


class CohereTextParser(CohereParser):
    """A parser for models after Command A, whose answers are in `<|START_TEXT|>`."""

    answer = ("<|START_TEXT|>", "<|END_TEXT|>")
