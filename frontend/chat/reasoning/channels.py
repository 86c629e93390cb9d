"""Parse answers that are sequences of channels, each with a header that names it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import ClassVar, Final

import msgspec

from ....protocol.sampling_params import FreeReasoning, StructuredOutput
from ...tokenizer.tokenizer import Tokenizer
from ..held_text import find_first, may_begin, start_of_held, start_of_marker
from .marked import ReasoningDelta, num_tokens_before

LONGEST_HEADER: Final = 1024


class Channel(Enum):
    """A kind of channel."""

    NONE = auto()
    """The parser is between channels."""
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()
    DROPPED = auto()


class ChannelParser(ABC):
    """Splits one text, fed in pieces, into reasoning and content; a subclass defines the format of channels.

    Calls become content, in the spelling of the tool parser. Text outside of all channels is content, too.

    Args:
        prompt: The rendered chat. Its last message, which the answer continues, may open a channel.
        constrained: Ignored; a grammar applies to the text of a channel.
    """

    marks: ClassVar[tuple[str, ...]]
    """The markers of the format."""
    begins_message: ClassVar[str]
    """The text that begins a message in the prompt."""
    header_starts: ClassVar[tuple[str, ...]]
    """The texts that can begin a header."""
    header_end: ClassVar[str]
    """The text that ends every header."""
    ends: ClassVar[Mapping[Channel, tuple[str, ...]]]
    """Channel -> the texts that end it. Those that begin a header are also part of what follows."""
    calls_end: ClassVar[str]
    """The text that ends calls in the spelling of the tool parser."""
    reasoning_ends: ClassVar[tuple[str, ...]]
    """The texts of which the first ends the reasoning."""
    trims_reasoning: ClassVar[bool] = False
    """True if whitespace around reasoning is dropped."""

    def __init__(self, prompt: str = "", *, constrained: bool = False) -> None:
        self._buffer = ""
        self._channel = Channel.NONE
        # The kinds of the channels so far.
        self._seen: set[Channel] = set()
        self._delta = ReasoningDelta()
        self._is_blank = True  # Whether the channel has only whitespace so far.
        _, start, tail = prompt.rpartition(self.begins_message)
        if start:
            self.feed(start + tail)
        self._first = self._channel

    def feed(self, text: str) -> ReasoningDelta:
        """Return the changes to the message that the next piece of text causes."""
        self._buffer += text
        self._delta = ReasoningDelta()
        while self._buffer and self._step():
            pass
        return self._delta

    def finish(self) -> ReasoningDelta:
        """Return the held-back text at the end. An incomplete header, or whitespace, between channels is dropped."""
        self._delta = ReasoningDelta()
        rest = self._buffer.lstrip()
        if self._channel is not Channel.NONE or (rest and not rest.startswith(self.header_starts)):
            self._emit(self._buffer)
        self._flush()
        self._buffer = ""
        return self._delta

    @property
    @abstractmethod
    def answer_start(self) -> str:
        """The text that makes the answer follow the prompt without reasoning."""

    @abstractmethod
    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the answer."""

    def can_limit(self, tokenizer: Tokenizer) -> bool:
        """Return False: reasoning cannot be cut at a token limit, because several tokens must follow its end."""
        return False

    def end_after(
        self, token_ids: Sequence[int], constraint: StructuredOutput, tokenizer: Tokenizer
    ) -> StructuredOutput | None:
        """Return None, because the reasoning cannot be cut."""
        return None

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of `token_ids` before the answer or the first call."""
        if self._first is Channel.CONTENT:
            return 0
        return num_tokens_before(self.reasoning_ends, token_ids, tokenizer)

    def num_hidden_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of all `token_ids`, because reasoning may follow content."""
        return len(token_ids)

    def _open(self, channel: Channel) -> None:
        """Open a channel. A separator is added if there is an earlier channel of the same kind."""
        self._channel = channel
        if channel in self._seen:
            self._emit("\n\n")
        self._is_blank = True
        self._seen.add(channel)

    @abstractmethod
    def _apply_header(self, header: str) -> None:
        """Open or close the channel that a header names."""

    # Each step consumes text or changes the state. It returns False if it needs more text to do so.

    def _step(self) -> bool:
        return self._read_header() if self._channel is Channel.NONE else self._read_text()

    def _read_header(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self.header_starts):
            self._buffer = text
            at = text.find(self.header_end, 0, LONGEST_HEADER)
            if at >= 0:
                end = at + len(self.header_end)
                self._buffer = text[end:]
                self._apply_header(text[:end])
                return True
            if len(text) < LONGEST_HEADER:
                return False
            # The first character is emitted at once, because the marker at the beginning may also end channels.
            self._open(Channel.CONTENT)
            self._emit(text[0])
            self._buffer = text[1:]
            return True
        if may_begin(text, self.header_starts):
            return False
        self._open(Channel.CONTENT)
        return True

    def _read_text(self) -> bool:
        ends = self.ends[self._channel]
        found = find_first(self._buffer, ends)
        trims = self.trims_reasoning and self._channel is Channel.REASONING
        start_of = start_of_held if trims else start_of_marker
        at = start_of(self._buffer, ends) if found is None else found[0]
        text = self._buffer[:at]
        if trims:
            text = text.rstrip() if found else text
            text = text.lstrip() if self._is_blank else text
            self._is_blank = self._is_blank and not text
        self._emit(text)
        self._buffer = self._buffer[at:]
        if found is None:
            return False
        if self._channel is Channel.CALLS:
            self._emit(self.calls_end)
        self._flush()
        if not found[1].startswith(self.header_starts):
            self._buffer = self._buffer[len(found[1]) :]
        self._channel = Channel.NONE
        return True

    def _emit(self, text: str) -> None:
        if self._channel is Channel.REASONING:
            self._delta.reasoning += text
        elif self._channel is not Channel.DROPPED:
            self._delta.content += text

    def _flush(self) -> None:  # noqa: B027
        """Emit what `_emit` holds back, at the end of a channel. The base class holds back nothing."""


def constrain_after(constraint: StructuredOutput, *rules: str) -> StructuredOutput:
    """Return the constraint, changed so that it applies only at `@answer` in a Lark grammar with these rules."""
    grammar = "\n".join([*rules, r"TEXT: /(.|\n)*/"])
    reasoning = FreeReasoning((), (), (), (), is_open=True, grammar=grammar)
    return msgspec.structs.replace(constraint, reasoning=reasoning)
