"""Parse the channels of gpt-oss's answers (the Harmony format).

An answer is a sequence of messages `<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`, whose first
`<|start|>` is part of the prompt. The channels are `analysis` (reasoning), `commentary` and `final`. A call is a
message to a function: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from typing import Final

import msgspec

from ...protocol.sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from ..tokenizer.tokenizer import Tokenizer
from .held_text import find_first, may_begin, start_of_marker
from .reasoning import ReasoningDelta, grammar_mark, has_special_tokens, num_tokens_before

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_END: Final = "<|end|>"
_CALL: Final = "<|call|>"
_ENDS: Final = (_END, _CALL, "<|return|>")
_HEADER_STARTS: Final = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, "to=")
_LONGEST_HEADER: Final = 1024
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")


class _State(Enum):
    START = auto()
    """The parser is before the head of a message."""
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyParser:
    """Splits one text, fed in pieces, into reasoning and content. `prompt` is the rendered chat.

    Function calls become content, in a uniform spelling for the tool parser. Messages to other recipients, such as the
    built-in browser, become reasoning.
    """

    marks: tuple[str, ...] = (_CHANNEL, _CONSTRAIN, _MESSAGE)

    def __init__(self, prompt: str = "", *, constrained: bool = False) -> None:
        self._buffer = ""
        self._state = _State.START
        # The kinds of the messages so far.
        self._kinds: set[_State] = set()
        self._delta = ReasoningDelta()
        _, start, tail = prompt.rpartition(_START)
        if start:
            self.feed(start + tail)
        self._begins_in_answer = self._state is _State.CONTENT

    def feed(self, text: str) -> ReasoningDelta:
        """Return the changes to the message that the next piece of text causes."""
        self._buffer += text
        self._delta = ReasoningDelta()
        while self._buffer and self._step():
            pass
        return self._delta

    def finish(self) -> ReasoningDelta:
        """Return the held-back text at the end. An incomplete header is dropped."""
        self._delta = ReasoningDelta()
        if self._state not in (_State.START, _State.HEADER):
            self._emit(self._buffer)
        elif self._state is _State.START and not self._buffer.lstrip().startswith(_HEADER_STARTS):
            self._delta.content = self._buffer
        self._buffer = ""
        return self._delta

    @property
    def answer_start(self) -> str:
        """The header of the final message, which makes the answer follow the prompt without reasoning."""
        return "" if self._begins_in_answer else f"{_CHANNEL}final{_MESSAGE}"

    def has_special_marks(self, tokenizer: Tokenizer) -> bool:
        """Return whether the markers are special tokens, so that a text without special tokens lacks them."""
        return has_special_tokens(self.marks, tokenizer)

    def can_limit(self, tokenizer: Tokenizer) -> bool:
        """Return False: reasoning cannot be cut at a token limit, because a message header must follow its end."""
        return False

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the final message.

        A Lark grammar may describe calls, which are separate messages. So with one, a final message is not required.
        """
        if self._begins_in_answer:
            return constraint

        mark = partial(grammar_mark, tokenizer)
        optional = "?" if constraint.kind is GrammarKind.LARK else ""
        grammar = "\n".join(
            [
                f'start: (free_message {mark(_START)} "assistant")* final_header{optional} @answer',
                f'free_message: {mark(_CHANNEL)} ("analysis" | "commentary") {mark(_MESSAGE)} free_text',
                f"free_text{'' if tokenizer.token_to_id(_END) else '[lazy]'}: TEXT {mark(_END)}",
                f'final_header: {mark(_CHANNEL)} "final" (" "? {mark(_CONSTRAIN)} "json")? {mark(_MESSAGE)}',
                r"TEXT: /(.|\n)*/",
            ]
        )
        reasoning = FreeReasoning((), (), (), (), is_open=True, grammar=grammar)
        return msgspec.structs.replace(constraint, reasoning=reasoning)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of `token_ids` before the answer or the first call."""
        if self._begins_in_answer:
            return 0
        ends = (f"{_CHANNEL}final", f"{_CHANNEL}commentary", "assistant to=")
        return num_tokens_before(ends, token_ids, tokenizer)

    # Each step consumes text or changes the state. It returns False if it needs more text to do so.

    def _step(self) -> bool:
        if self._state is _State.START:
            return self._read_start()
        if self._state is _State.HEADER:
            return self._read_header()
        return self._read_message()

    def _read_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_HEADER_STARTS):
            self._buffer = text
            self._state = _State.HEADER
            return True
        if may_begin(text, _HEADER_STARTS):
            return False
        self._begin(_State.CONTENT)
        return True

    def _read_header(self) -> bool:
        end = self._buffer.find(_MESSAGE, 0, _LONGEST_HEADER)
        if end < 0:
            if len(self._buffer) < _LONGEST_HEADER:
                return False
            self._begin(_State.CONTENT)
            return True
        header, self._buffer = self._buffer[:end], self._buffer[end + len(_MESSAGE) :]
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            self._state = _State.CALL
            self._emit(f"{_CHANNEL}commentary to={recipient[1]}{_MESSAGE}")
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._begin(_State.REASONING)
        else:
            self._begin(_State.CONTENT)
        return True

    def _begin(self, kind: _State) -> None:
        """Begin a message. A separator is added if there is an earlier message of the same kind."""
        self._state = kind
        if kind in self._kinds:
            self._emit("\n\n")
        self._kinds.add(kind)

    def _read_message(self) -> bool:
        ends = (*_ENDS, _START)
        found = find_first(self._buffer, ends)
        at = start_of_marker(self._buffer, ends) if found is None else found[0]
        self._emit(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if found is None:
            return False
        if self._state is _State.CALL:
            self._emit(_CALL)
        if found[1] in _ENDS:
            self._buffer = self._buffer[len(found[1]) :]
        self._state = _State.START
        return True

    def _emit(self, text: str) -> None:
        if self._state is _State.REASONING:
            self._delta.reasoning += text
        else:
            self._delta.content += text
