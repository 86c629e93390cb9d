"""The part of a stream's encoding that completions and chat completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from ...client.engine_client import Delta, Sequence
from ...http.json_pieces import encode_whole
from ..answer import Answer
from ..generation import raise_if_failed
from ..logprobs import Json
from ..receipts.timings import llama_prompt_timings
from .event_stream import OPENAI_STREAM, ChunkEncoder, event
from .progress import ProgressChunks

Identify = Callable[[Sequence, bytes], bytes]
"""Adds an event ID to the events of a sequence."""

AnswerT = TypeVar("AnswerT", bound=Answer[Any])


class Chunks(ABC, Generic[AnswerT]):
    """Encodes the chunks of an answer, with usage if the request asks for it.

    If a choice has nothing but new text (`is_plain`), its chunk is filled into a template, which is made once per
    request: the text is inserted between `before` and `after`.
    """

    __slots__ = (
        "_answer",
        "_heads",
        "_id_start",
        "_identify_last",
        "_include_usage",
        "_is_plain",
        "_tail",
        "_uncounted_prompts",
        "_usage",
    )

    format = OPENAI_STREAM
    _empty_choice: ClassVar[Json]
    """The fields for the output of a choice that has none."""

    def __init__(
        self,
        answer: AnswerT,
        num_choices: int,
        *,
        is_plain: bool,
        before: bytes,
        after: bytes,
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
        self._is_plain = is_plain and self._usage is None
        envelope = b"data: " + encode_whole(answer.envelope)[:-1]
        self._heads = [
            b'%b,"choices":[{"index":%d,%b' % (envelope, index, before)
            for index in range(num_choices)
        ]
        self._tail = _plain_tail(after, self._include_usage)
        self._id_start = b""
        self._identify_last: Identify | None = None

    def identify_plain(self, start: bytes, identify_last: Identify) -> bool:
        """Begin plain chunks with an event ID: `start` and the number of tokens read.

        `identify_last` adds an ID to the events at the end of the sequence. Return False if no chunk is plain.

        Call this only for answers with one sequence.
        """
        if not self._is_plain:
            return False
        self._id_start, self._identify_last = start, identify_last
        self._heads = [b"\n" + head for head in self._heads]
        return True

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output of a sequence."""
        if not self._is_plain or sequence.finish_reason is not None:
            body = self._render(sequence)
            return body if self._identify_last is None else self._identify_last(sequence, body)
        text = sequence.read_text()
        if not text:
            return b""
        head = self._heads[sequence.position]
        if self._id_start:
            # One expression is faster than adding an ID to the finished chunk.
            number = b"%d" % sequence.num_read_tokens
            return b"".join((self._id_start, number, head, encode_whole(text), self._tail))
        return b"".join((head, encode_whole(text), self._tail))

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
        if choice.get("finish_reason") is not None:
            chunk |= self._answer.transfer()
        if self._include_usage:
            chunk["usage"] = self._usage
        return event(chunk)

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
