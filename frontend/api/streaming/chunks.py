"""The part of a stream's encoding that completions and chat completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from ...client.engine_client import Delta, Sequence
from ...http.json_pieces import encode_whole
from ..answer import Answer
from ..generation import raise_if_failed
from ..inputs.hidden_states import last_states
from ..logprobs import Json
from ..receipts.timings import llama_prompt_timings
from .event_stream import OPENAI_STREAM, ChunkEncoder, Template, event
from .progress import ProgressChunks

AnswerT = TypeVar("AnswerT", bound=Answer[Any])


class Chunks(ABC, Generic[AnswerT]):
    """Encodes the chunks of an answer, with usage if the request asks for it.

    A choice that has only new text is made from a template, which is encoded once per request.

    Args:
        answer: The answer.
        text_parts: The bytes before and after the text in such a choice; None if every choice has more than text.
        is_plain: True if the text is that of the tokens, so that it is not parsed.
    """

    __slots__ = (
        "_answer",
        "_include_usage",
        "_is_plain",
        "_text_parts",
        "_uncounted_prompts",
        "_usage",
    )

    format = OPENAI_STREAM
    _empty_choice: ClassVar[Json]
    """The fields for the output of a choice that has none."""

    def __init__(
        self,
        answer: AnswerT,
        text_parts: tuple[bytes, bytes] | None = None,
        *,
        is_plain: bool = True,
    ) -> None:
        self._answer = answer
        options = answer.request.stream_options
        is_forced = answer.serving.config.frontend.force_include_usage
        self._include_usage = is_forced or bool(options and options.include_usage)
        self._usage: Json | None = None
        self._uncounted_prompts: set[int] = set()
        is_continuous = is_forced or bool(options and options.continuous_usage_stats)
        if self._include_usage and is_continuous:
            self._usage = answer.usage_so_far()
            self._uncounted_prompts = answer.first_positions()
        self._text_parts: list[tuple[bytes, bytes]] = []
        if text_parts is not None and self._usage is None:
            before, after = text_parts
            envelope = encode_whole(answer.envelope)[:-1]
            tail = _plain_tail(after, self._include_usage)
            self._text_parts = [
                (b'data: %b,"choices":[{"index":%d,%b' % (envelope, index, before), tail)
                for index in range(answer.num_sequences)
            ]

        self._is_plain = is_plain and bool(self._text_parts)

    def template(self) -> Template | None:
        """Return the parts of a chunk with text only, if there are such chunks and the answer has one choice."""
        is_single = self._is_plain and len(self._text_parts) == 1
        return Template(*self._text_parts[0]) if is_single else None

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output of a sequence."""
        if not self._is_plain or sequence.finish_reason is not None:
            return self._render(sequence)
        text = sequence.read_as_json()
        return self._fill(sequence.position, text) if text else b""

    def _fill(self, index: int, text: bytes) -> bytes:
        """Return the event with the text of a choice, given as JSON without quotes."""
        before, after = self._text_parts[index]
        return b"".join((before, text, after))

    @abstractmethod
    def _render(self, sequence: Sequence) -> bytes:
        """Return the events for output that does not fit the template."""

    def read(self, sequence: Sequence) -> Delta:
        """Return the new output of a sequence. Raise APIError if the sequence failed."""
        num_before = sequence.num_read_tokens
        delta = sequence.read_some()
        if self._usage is not None:
            self._answer.add_to_usage(self._usage, sequence.num_read_tokens - num_before)
            if sequence.position in self._uncounted_prompts:
                self._uncounted_prompts.remove(sequence.position)
                self._answer.add_cached_tokens(self._usage, sequence.num_cached_tokens)
        raise_if_failed(delta, shows_abort=self._answer.shows_abort)
        return delta

    def chunk(self, choice: Json, **more: object) -> bytes:
        """Return the event with one choice."""
        chunk = self._answer.envelope | {"choices": [choice]} | more
        is_last = choice.get("finish_reason") is not None
        if is_last:
            chunk |= self._answer.transfer()
        if self._include_usage:
            chunk["usage"] = self._usage
        return event(chunk) + (self._hidden_states(choice["index"]) if is_last else b"")

    def _hidden_states(self, position: int) -> bytes:
        """Return the event with the hidden states of a sequence that has ended; b"" if it returns none."""
        states = last_states(self._answer.sequence_at(position))
        if not states:
            return b""
        choice = self._empty_choice | {"index": position, "finish_reason": None}
        return self.chunk(choice | ({"delta": states} if "delta" in choice else states))

    def progress(self, sequence: Sequence, progress: Json) -> bytes:
        """Return the event with the progress of a sequence's prompt."""
        choice = self._empty_choice | {"index": sequence.position, "finish_reason": None}
        more: Json = {"prompt_progress": progress}
        if self._answer.request.timings_per_token:
            more["timings"] = llama_prompt_timings(progress)
        return self.chunk(choice, **more)

    def with_progress(self) -> ChunkEncoder:
        """Return this encoder, with the progress of the prompts if the request asks for it."""
        wanted = self._answer.request.return_progress
        return ProgressChunks(self, self.progress) if wanted else self

    def closing(self) -> bytes:
        """Return the events between the last output and `[DONE]`."""
        answer, last = self._answer, b""
        if extension := answer.extension():
            last = event(answer.envelope | {"choices": []} | extension)
        if not self._include_usage:
            return last
        usage = {"choices": [], "usage": answer.usage()}
        return last + event(answer.envelope | usage | answer.timing())


@cache
def _plain_tail(after: bytes, include_usage: bool) -> bytes:
    """Return the end of a plain chunk. All requests share one object, which stays in the processor's cache."""
    end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
    return after + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + end
