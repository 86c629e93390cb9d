"""Parse the blocks of Inkling's answers.

An answer is a sequence of blocks `<|message_model|>NAME KIND TEXT<|end_message|>`. NAME is empty except before calls.
The kinds are `<|content_thinking|>` (reasoning), `<|content_text|>` and `<|content_invoke_tool_json|>`, whose text is
`{"name": …, "args": {…}}`. The first `<|message_model|>` is part of the prompt.

Format: vLLM's `inkling`.
"""

from typing import Final

from ..held_text import find_first
from .channels import LONGEST_HEADER, Channel
from .delimited import DelimitedChannelParser
from .marked import ReasoningDelta

_MESSAGE: Final = "<|message_model|>"
_CALL: Final = "<|content_invoke_tool_json|>"
_END: Final = "<|end_message|>"
_END_SAMPLING: Final = "<|content_model_end_sampling|>"
_KINDS: Final = {
    "<|content_thinking|>": Channel.REASONING,
    "<|content_text|>": Channel.CONTENT,
    "<|content_invoke_tool_text|>": Channel.CONTENT,
    "<|content_tool_error|>": Channel.CONTENT,
    _CALL: Channel.CALLS,
}
_HEADER_ENDS: Final = (*_KINDS, _END, _END_SAMPLING)
_ENDS: Final = {
    Channel.REASONING: (_END, _END_SAMPLING, _CALL),
    Channel.CONTENT: (_END, _END_SAMPLING, _MESSAGE),
    Channel.CALLS: (_END, _END_SAMPLING),
}


class InklingParser(DelimitedChannelParser):
    """Splits one text of Inkling into reasoning and content. Blocks with calls become content, with their markers."""

    marks = (_MESSAGE, *_KINDS, _END)
    begins_message = _MESSAGE
    header_starts = (_MESSAGE, "<|content_")
    header_end = "|>"
    ends = _ENDS
    calls_end = _END
    reasoning_ends = ("<|content_text|>", _CALL)
    think = ("<|content_thinking|>", _END)
    answer = ("<|content_text|>", _END)
    between = _MESSAGE
    trims_reasoning = True

    def finish(self) -> ReasoningDelta:
        """Return the held-back text at the end. Text without a kind is content."""
        text = self._buffer.replace(_MESSAGE, "")
        if self._channel is Channel.NONE and text.strip() and not text.startswith("<|"):
            self._buffer = text
            self._open(Channel.CONTENT)
        return super().finish()

    def _read_header(self) -> bool:
        found = find_first(self._buffer, _HEADER_ENDS)
        if found is None:
            is_too_long = len(self._buffer) >= LONGEST_HEADER
            if is_too_long:
                self._buffer = self._buffer.replace(_MESSAGE, "")
                self._open(Channel.CONTENT)
            return is_too_long
        at, mark = found
        text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        if mark in _KINDS:
            self._apply_header(mark)
        elif text := text.replace(_MESSAGE, "").strip():
            self._open(Channel.CONTENT)
            self._emit(text)
            self._channel = Channel.NONE
        return True

    def _apply_header(self, header: str) -> None:
        channel = _KINDS[header]
        self._open(channel)
        if channel is Channel.CALLS:
            self._emit(header)
