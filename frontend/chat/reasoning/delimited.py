"""Parse answers whose channels have a text before and after them, each with special tokens."""

import json
import re
from typing import ClassVar, Final

from ....protocol.sampling_params import GrammarKind, StructuredOutput
from ...tokenizer.tokenizer import Tokenizer
from .channels import Channel, ChannelParser, constrain_after
from .marked import grammar_mark

_MARK: Final = re.compile(r"(<\|[^<>|]+\|>)")


class DelimitedChannelParser(ChannelParser):
    """Splits one text into reasoning and content; a subclass defines the texts around channels."""

    think: ClassVar[tuple[str, str]]
    """The texts before and after reasoning."""
    answer: ClassVar[tuple[str, str]]
    """The texts before and after the answer."""
    between: ClassVar[str] = ""
    """The text between two channels."""
    message_end: ClassVar[str] = ""
    """The text that ends the last channel in place of the end of the prompt's message."""

    @property
    def answer_start(self) -> str:
        """The text that begins the answer, so that the answer follows the prompt without reasoning."""
        if self._first is Channel.CONTENT:
            return ""
        end = self.think[1] + self.between
        return (end if self._first is Channel.REASONING else "") + self.answer[0]

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the answer.

        A Lark grammar may describe calls, whose channel comes after the answer. So with one, an answer is optional.
        """
        is_grammar = constraint.kind is GrammarKind.LARK
        if self._first is Channel.CONTENT and not is_grammar:
            return constraint

        def tag(text: str) -> str:
            pieces = filter(None, _MARK.split(text))
            marks = (
                grammar_mark(tokenizer, piece) if _MARK.fullmatch(piece) else json.dumps(piece)
                for piece in pieces
            )
            return " ".join(marks)

        between = f" ({tag(self.between)})?" if self.between else ""
        end, think = tag(self.answer[1]), f"to_end_of_think{between}"
        if self._first is not Channel.REASONING:
            think = f"({tag(self.think[0])} {think})?"
        begin = f"{think} {tag(self.answer[0])}"
        if is_grammar:
            begin = f"{think} ({tag(self.answer[0])} to_end_of_answer{between})?"
            if self._first is Channel.CONTENT:
                begin = f"(to_end_of_answer{between})?"
        after = f"({tag(self.message_end)})?" if self.message_end else ""
        is_token = tokenizer.token_to_id(_MARK.split(self.think[1])[1]) is not None
        lazy = "" if is_token else "[lazy]"
        return constrain_after(
            constraint,
            f"start: {begin} @answer ({end})? {after}",
            f"to_end_of_think{lazy}: TEXT {tag(self.think[1])}",
            f"to_end_of_answer{lazy}: TEXT {end}",
        )
