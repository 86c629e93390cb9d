"""Separate a model's reasoning from its answer."""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import Enum, auto
from itertools import accumulate, groupby
from typing import Final

import msgspec

from ....protocol.config.frontend import ReasoningParserName
from ....protocol.sampling_params import FreeReasoning, StructuredOutput
from ...tokenizer.tokenizer import Tokenizer
from ..held_text import find_first, may_begin, start_of_held


class ReasoningFormat(msgspec.Struct, frozen=True):
    """A format in which reasoning is the text between the first of `starts` and the first of `ends`.

    Attributes:
        implied: True if a text without a start marker is reasoning up to an end marker.
        calls: The markers of calls. They end reasoning too, unless a text mentions them after a space or a quote.
        answer: The markers around the answer. Models may omit them.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implied: bool = False
    calls: tuple[str, ...] = ()
    answer: tuple[str, str] = ("", "")


class ReasoningDelta(msgspec.Struct):
    """The reasoning and content that a piece of text adds to a message."""

    reasoning: str = ""
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content)


class _State(Enum):
    START = auto()
    REASONING_START = auto()
    """The parser is in the reasoning, before its first character that is not whitespace."""
    REASONING = auto()
    CONTENT_START = auto()
    ANSWER_START = auto()
    ANSWER = auto()
    """The parser is between the markers of the answer."""
    CONTENT = auto()


class MarkedReasoningParser:
    """Splits a text that begins with reasoning between two markers.

    Whitespace around the reasoning is dropped. If the content is `constrained`, whitespace before it is part of the
    answer and is kept. `prompt` is the rendered chat, because templates may open or even close the reasoning
    themselves.
    """

    def __init__(
        self, format: ReasoningFormat, prompt: str = "", *, constrained: bool = False
    ) -> None:
        self._format = format
        self._after_end = _State.CONTENT if constrained else _State.CONTENT_START
        self._buffer = ""
        prompt = prompt.rstrip()
        self._begins_closed = prompt.endswith(format.ends)
        self._begins_opened = not self._begins_closed and (
            format.implied or prompt.endswith(format.starts)
        )
        self._opened = self._begins_opened
        self._last = ""  # The last character of the reasoning so far.
        self._state = _State.CONTENT if self._begins_closed else _State.START

    def feed(self, text: str) -> ReasoningDelta:
        """Return the changes to the message that the next piece of text causes."""
        self._buffer += text
        delta = ReasoningDelta()
        if self._state is _State.START:
            self._read_start()
        if self._state is _State.REASONING_START:
            self._skip_whitespace(_State.REASONING)
        if self._state is _State.REASONING:
            self._read_reasoning(delta)
        if self._state is _State.CONTENT_START:
            self._read_content_start()
        if self._state is _State.ANSWER_START:
            self._skip_whitespace(_State.ANSWER)
        if self._state is _State.ANSWER:
            self._read_answer(delta)
        if self._state is _State.CONTENT:
            delta.content += self._buffer
            self._buffer = ""
        return delta

    def finish(self) -> ReasoningDelta:
        """Return the held-back text at the end."""
        rest, self._buffer = self._buffer, ""
        if self._state in (_State.REASONING, _State.REASONING_START) or self._opened:
            return ReasoningDelta(reasoning=rest.rstrip())
        is_before = self._state in (_State.CONTENT_START, _State.ANSWER_START)
        return ReasoningDelta(content="" if is_before and not rest.strip() else rest)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that start or end the reasoning."""
        return self._format.starts + self._format.ends

    @property
    def answer_start(self) -> str:
        """The text that ends the reasoning if the prompt begins it, so that the answer follows the prompt."""
        return f"{self._format.ends[0]}\n\n" if self._begins_opened else ""

    def can_limit(self, tokenizer: Tokenizer) -> bool:
        """Return whether an end marker is a single token, which can be forced after any text."""
        return bool(_token_ids(self._format.ends, tokenizer))

    def allow_reasoning_before(
        self, constraint: StructuredOutput, tokenizer: Tokenizer, max_tokens: int = -1
    ) -> StructuredOutput:
        """Return the constraint extended so that unconstrained reasoning may precede the answer."""
        if self._begins_closed:
            return constraint
        starts, ends = self._format.starts, self._format.ends
        reasoning = FreeReasoning(
            starts,
            ends,
            _first_token_ids(starts, tokenizer),
            _token_ids(ends, tokenizer),
            is_open=self._begins_opened,
            max_tokens=max_tokens,
        )
        return msgspec.structs.replace(constraint, reasoning=reasoning)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of `token_ids` before the end of the reasoning."""
        if self._begins_closed:
            return 0
        if not self._begins_opened:
            beginning = b"".join(map(tokenizer.token_bytes, token_ids[:_MAX_START_TOKENS]))
            starts = tuple(start.encode() for start in self._format.starts)
            if not beginning.lstrip().startswith(starts):
                return 0
        return num_tokens_before(self._format.ends, token_ids, tokenizer)

    def num_hidden_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of `token_ids` that a request without reasoning must not see."""
        return self.num_reasoning_tokens(token_ids, tokenizer)

    def end_after(
        self, token_ids: Sequence[int], constraint: StructuredOutput, tokenizer: Tokenizer
    ) -> StructuredOutput | None:
        """Return the constraint extended so that the reasoning that these tokens begin must end after them.

        The result is None if the tokens are not the beginning of a reasoning.
        """
        text = b"".join(map(tokenizer.token_bytes, token_ids))
        begins = text.lstrip().startswith(tuple(map(str.encode, self._format.starts)))
        has_ended = any(end.encode() in text for end in self._format.ends)
        if self._begins_closed or has_ended or not (begins or self._begins_opened):
            return None
        ends = _token_ids(self._format.ends, tokenizer)
        grammar = _exactly(token_ids, tokenizer.special_ids, ends)
        reasoning = FreeReasoning((), (), (), (), is_open=True, grammar=grammar)
        return msgspec.structs.replace(constraint, reasoning=reasoning)

    def _read_start(self) -> None:
        text = self._buffer.lstrip()
        starts = self._format.starts
        start = max((s for s in starts if text.startswith(s)), key=len, default=None)
        if start is not None:
            if any(other != start and other.startswith(text) for other in starts):
                return  # The text may become a longer marker.
            self._buffer = text.removeprefix(start)
            self._opened = True
            self._state = _State.REASONING_START
        elif not self._opened and text.startswith(self._format.ends):
            # Without reasoning, MiniMax M3 begins its answer with the end marker.
            end = next(end for end in self._format.ends if text.startswith(end))
            self._buffer = text.removeprefix(end)
            self._state = self._after_end
        elif not may_begin(text, self._format.starts + self._format.ends * (not self._opened)):
            self._state = _State.REASONING_START if self._opened else _State.CONTENT

    def _skip_whitespace(self, then: _State) -> None:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = then

    def _read_reasoning(self, delta: ReasoningDelta) -> None:
        marks = self._format.ends + self._format.calls
        while (found := find_first(self._buffer, marks)) is not None:
            at, mark = found
            before = self._buffer[:at]
            if mark in self._format.calls and (before or self._last)[-1:] in _BEFORE_MENTION:
                self._move_reasoning(delta, at + len(mark))
                continue
            delta.reasoning += before.rstrip()
            self._buffer = self._buffer[at:].removeprefix(
                "" if mark in self._format.calls else mark
            )
            self._opened = False
            self._state = self._after_end
            return
        self._move_reasoning(delta, start_of_held(self._buffer, marks))

    def _move_reasoning(self, delta: ReasoningDelta, end: int) -> None:
        delta.reasoning += self._buffer[:end]
        self._last = self._buffer[:end][-1:] or self._last
        self._buffer = self._buffer[end:]

    def _read_content_start(self) -> None:
        start, _ = self._format.answer
        self._skip_whitespace(_State.CONTENT)
        if start and self._buffer.startswith(start):
            self._buffer = self._buffer.removeprefix(start)
            self._state = _State.ANSWER_START
        elif start and may_begin(self._buffer, (start,)):
            self._state = _State.CONTENT_START

    def _read_answer(self, delta: ReasoningDelta) -> None:
        ends = (self._format.answer[1],)
        found = find_first(self._buffer, ends)
        if found is None:
            held_from = start_of_held(self._buffer, ends)
            delta.content, self._buffer = self._buffer[:held_from], self._buffer[held_from:]
            return
        at, end = found
        delta.content = self._buffer[:at].rstrip()
        self._buffer = self._buffer[at + len(end) :].lstrip()
        self._state = _State.CONTENT if self._buffer else _State.CONTENT_START


class WholeTextParser(MarkedReasoningParser):
    """Keeps reasoning in the content, after the start marker, which is part of the prompt."""

    _is_started = False

    def feed(self, text: str) -> ReasoningDelta:
        """Return the text as content, with the start marker before the first piece."""
        start = "" if self._is_started or not text else self._format.starts[0]
        self._is_started = self._is_started or bool(text)
        return ReasoningDelta(content=start + text)

    def finish(self) -> ReasoningDelta:
        """Return nothing, because no text is held back."""
        return ReasoningDelta()


def has_special_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Return whether one of the texts begins with a special token."""
    return not tokenizer.special_ids.isdisjoint(_first_token_ids(texts, tokenizer))


def grammar_mark(tokenizer: Tokenizer, text: str) -> str:
    """Return a mark in a grammar in Lark's notation: the token if it is one, else its text."""
    token_id = tokenizer.token_to_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _exactly(token_ids: Sequence[int], special_ids: Collection[int], ends: Sequence[int]) -> str:
    """Return a grammar in Lark's notation of a text like these tokens, one of the `ends`, and the answer.

    The text has the special tokens of `token_ids`, and at most as many other tokens between them.
    """
    pieces: list[str] = []
    rules = [r"TEXT: /(.|\n)*/", "end: " + " | ".join(f"<[{end}]>" for end in ends)]
    for is_special, run in groupby(token_ids, lambda token_id: token_id in special_ids):
        if is_special:
            pieces += (f"<[{token_id}]>" for token_id in run)
        else:
            name = f"text_{len(rules)}"
            rules.append(f"{name}[max_tokens={len(list(run))}]: TEXT")
            pieces.append(name)
    return "\n".join([f"start: {' '.join(pieces)} end @answer", *rules])


def num_tokens_before(texts: Sequence[str], token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens before the first of the texts; all if none occurs."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    whole = b"".join(pieces)
    found = [at for text in texts if (at := whole.find(text.encode())) >= 0]
    if not found:
        return len(pieces)
    return bisect_left([0, *accumulate(map(len, pieces))], min(found))


def _token_ids(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the IDs of those texts that are a single token."""
    found = map(tokenizer.token_to_id, texts)
    return tuple(token_id for token_id in found if token_id is not None)


def _first_token_ids(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ID of each text, or of the tag at its beginning, if that is a single token."""
    tags = [match[0] if (match := _TAG.match(text)) else text for text in texts]
    return tuple(dict.fromkeys(_token_ids((*texts, *tags), tokenizer)))


_BEFORE_MENTION: Final = frozenset(" \t`'\"(")
"""The characters before a marker that a text only mentions."""
_TAG: Final = re.compile(r"<[^<>]+>")
_MAX_START_TOKENS: Final = 64

_THINK: Final = ReasoningFormat(calls=("<tool_call>",))
_DSML: Final = ReasoningFormat(calls=("<｜DSML｜tool_calls>", "<｜DSML｜ calls>"))

REASONING_FORMATS: Final[dict[ReasoningParserName, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(implied=True),
    "qwen3": _THINK,
    "deepseek_v3": ReasoningFormat(),
    "deepseek_v4": _DSML,
    "glm45": _THINK,
    "kimi_k2": ReasoningFormat(calls=("<|tool_calls_section_begin|>",)),
    "minimax_m2": ReasoningFormat(calls=("<minimax:tool_call>",)),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    "k2_horizon": ReasoningFormat(
        starts=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ends=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        calls=("<ifm|tool_calls>",),
    ),
    "granite": ReasoningFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), calls=("[TOOL_CALLS]",)),
    "kimi_vl": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), calls=("<seed:tool_call>",)),
    "gemma4": ReasoningFormat(
        ("<|channel>thought\n", "<|channel>thought", "<|channel>"),
        ("<channel|>",),
        calls=("<|tool_call>",),
    ),
    "ernie45": ReasoningFormat(implied=True, answer=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningFormat(answer=("<answer>", "</answer>")),
    "plamo3": ReasoningFormat(
        ("<|plamo:begin_think:plamo|>",),
        ("<|plamo:end_think:plamo|>",),
        calls=("<|plamo:begin_tool_requests:plamo|>",),
    ),
}
"""Name of `--reasoning-parser` -> the format, if it is text between two markers."""
