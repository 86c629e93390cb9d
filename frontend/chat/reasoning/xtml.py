"""Parse the channels of Kimi K3's answers (the XTML format).

An answer is a sequence of channels, `<|open|>NAME<|sep|>TEXT<|close|>NAME<|sep|>`: first `think` (the reasoning), then
`response`, then `tools` if there are calls. `<|close|>message<|sep|>` ends it. The tag that opens the first channel is
part of the prompt.
"""

import re
from typing import Final

from .channels import Channel
from .delimited import DelimitedChannelParser

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


class XtmlParser(DelimitedChannelParser):
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
    think = (f"{_OPEN}think{_SEP}", _CLOSES_THINK)
    answer = (_OPENS_RESPONSE, _CLOSES_RESPONSE)
    message_end = _CLOSES_MESSAGE

    def _apply_header(self, header: str) -> None:
        tag = _TAG.fullmatch(header)
        if tag is None:
            self._buffer = header + self._buffer
            self._open(Channel.CONTENT)
        elif tag["kind"] == "open" and (channel := _CHANNELS.get(tag["name"])) is not None:
            self._open(channel)
            if channel is Channel.CALLS:
                self._emit(_OPENS_TOOLS)
