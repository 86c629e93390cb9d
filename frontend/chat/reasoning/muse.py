"""Parse the messages of Muse's answers.

An answer is a sequence of messages `<|start|>assistant to=RECIPIENT<|message|>TEXT<|eom|>`. The prompt contains the
first `<|start|>assistant`. Messages to `self`, or to nobody, are reasoning; those to `user` and `commentary` are
content; those to `developer` are dropped. All others are to functions. They contain calls in elements, as the `muse`
tool parser reads them. `<|eot|>` ends the last message.

Format: vLLM's `muse`.
"""

import re
from typing import Final

from .channels import Channel
from .delimited import DelimitedChannelParser

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|eom|>", "<|eot|>", _START)
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNELS: Final = {
    "self": Channel.REASONING,
    "user": Channel.CONTENT,
    "commentary": Channel.CONTENT,
    "developer": Channel.DROPPED,
}


class MuseParser(DelimitedChannelParser):
    """Splits one text of Muse into reasoning and content. Messages to functions become content."""

    marks = (_START, _MESSAGE, "<|eom|>")
    begins_message = _START
    header_starts = (_START, "to=", _MESSAGE)
    header_end = _MESSAGE
    ends = dict.fromkeys(Channel, _ENDS)
    calls_end = ""
    reasoning_ends = (" to=user", " to=commentary", "<atem:function_calls>")
    think = (f" to=self{_MESSAGE}", "<|eom|>")
    answer = (f" to=user{_MESSAGE}", "<|eot|>")
    between = f"{_START}assistant"

    def _apply_header(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            self._open(Channel.REASONING)
        else:
            self._open(_CHANNELS.get(recipient[1], Channel.CALLS))
