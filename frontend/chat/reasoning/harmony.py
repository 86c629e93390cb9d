"""Parse the channels of gpt-oss's answers (the Harmony format).

An answer is a sequence of messages `<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`, whose first
`<|start|>` is part of the prompt. The channels are `analysis` (reasoning), `commentary` and `final`. A call is a
message to a function: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

import re
from functools import partial
from typing import Final

from ....protocol.sampling_params import GrammarKind, StructuredOutput
from ...tokenizer.tokenizer import Tokenizer
from .channels import Channel, ChannelParser, constrain_after
from .marked import grammar_mark

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_END: Final = "<|end|>"
_CALL: Final = "<|call|>"
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")


class HarmonyParser(ChannelParser):
    """Splits one text of gpt-oss, fed in pieces, into reasoning and content.

    Function calls become content, in a uniform spelling. Messages to other recipients, such as the built-in browser,
    become reasoning.
    """

    marks = (_CHANNEL, _CONSTRAIN, _MESSAGE)
    begins_message = _START
    header_starts = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, "to=")
    header_end = _MESSAGE
    ends = dict.fromkeys(Channel, (_END, _CALL, "<|return|>", _START))
    calls_end = _CALL
    reasoning_ends = (f"{_CHANNEL}final", f"{_CHANNEL}commentary", "assistant to=")

    @property
    def answer_start(self) -> str:
        """The header of the final message, which makes the answer follow the prompt without reasoning."""
        return "" if self._first is Channel.CONTENT else f"{_CHANNEL}final{_MESSAGE}"

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint, changed so that it applies only to the final message.

        A Lark grammar may describe calls, which are separate messages. So with one, a final message is not required.
        """
        if self._first is Channel.CONTENT:
            return constraint
        mark = partial(grammar_mark, tokenizer)
        optional = "?" if constraint.kind is GrammarKind.LARK else ""
        return constrain_after(
            constraint,
            f'start: (free_message {mark(_START)} "assistant")* final_header{optional} @answer',
            f'free_message: {mark(_CHANNEL)} ("analysis" | "commentary") {mark(_MESSAGE)} free_text',
            f"free_text{'' if tokenizer.token_to_id(_END) else '[lazy]'}: TEXT {mark(_END)}",
            f'final_header: {mark(_CHANNEL)} "final" (" "? {mark(_CONSTRAIN)} "json")? {mark(_MESSAGE)}',
        )

    def _apply_header(self, header: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            self._open(Channel.CALLS)
            self._emit(f"{_CHANNEL}commentary to={recipient[1]}{_MESSAGE}")
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._open(Channel.REASONING)
        else:
            self._open(Channel.CONTENT)
