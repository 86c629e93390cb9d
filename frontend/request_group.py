"""What one HTTP request generates, as its handler reads it.

Tokens are stored as they come and become text when the handler reads them, so a slow client costs a list of integers.
Only sequences with stop strings are detokenised at once.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy.typing as npt

from ..protocol.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from ..protocol.sampling_params import SamplingParams
from .core_load import CoreLoad
from .detokenizer import IncrementalDetokenizer
from .logprobs import PositionLogprobs, decode_logprobs

ONLY_WHEN_FINISHED: Final = sys.maxsize

SUSPICIOUS_SILENT_DEATHS: Final = 2
MAX_SILENT_DEATHS: Final = 3
"""A sequence that has seen more of them fails. It was computed alone at the last two."""

FAILURES: Final = frozenset(FinishReason) - {
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
}


@dataclass(slots=True)
class SequenceRequest:
    """One prompt with one sampling. `prompt_token_ids` are integers [T], `params.n` is not expanded.

    `deadline` is in CLOCK_MONOTONIC seconds, 0 for none. `data_parallel_rank` is the replica to use, None for any.
    """

    prompt_token_ids: npt.ArrayLike
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    deadline: float = 0.0
    data_parallel_rank: int | None = None


class Delta(msgspec.Struct, gc=False):
    """What is new of one sequence since the last read.

    `error` is set when `finish_reason` is none of "stop", "length" and "abort". `stop_reason` is the stop string or
    stop token id, None for the end-of-sequence token. After `retry_after_s` what found no room may be tried again.
    """

    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    retry_after_s: float = 0.0


class Sequence:
    """One prompt being continued: its tokens, its end, and its times for the metrics.

    `token_ids` are all that were generated; the reader is woken when there are `wake_at` of them.

    Times are CLOCK_MONOTONIC seconds, 0.0 until known; `arrival_time` and `finish_time` are the frontend's, the others
    the core's. `epoch` is that of the core that the sequence was sent to last, 0 for none. `block_keys` are those of
    its prompt where there are several replicas. It `was_accepted` once a core has told that it has it.

    `num_losses` counts the replicas that were lost while they computed it, since it was last cleared of suspicion.
    `num_silent_deaths` counts the cores in a row that died without a last message between being sent the sequence and
    returning a token of it.
    """

    __slots__ = (
        "_detokenizer",
        "_num_read",
        "_num_tokens_when_lost",
        "_text",
        "arrival_time",
        "block_keys",
        "core_index",
        "epoch",
        "error",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "group",
        "has_news",
        "has_stop_strings",
        "last_token_time",
        "load",
        "logprobs",
        "max_tokens",
        "num_cached_tokens",
        "num_losses",
        "num_prompt_tokens",
        "num_silent_deaths",
        "params",
        "position",
        "prompt_logprob_messages",
        "queued_time",
        "request",
        "retry_after_s",
        "scheduled_time",
        "stop_reason",
        "token_ids",
        "wake_at",
        "was_accepted",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        num_prompt_tokens: int,
        detokenizer: IncrementalDetokenizer | None,
        core_index: int,
        load: CoreLoad,
        block_keys: list[int],
    ) -> None:
        self.request = request
        self.block_keys = block_keys
        self.num_losses = 0
        self.num_silent_deaths = 0
        self.epoch = 0
        self.was_accepted = False
        self._num_tokens_when_lost = -1
        self.core_index = core_index
        self.load = load
        self.params = params
        self.max_tokens = request.sampling_params.max_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.has_stop_strings = bool(params.stop)

        self.group: RequestGroup
        self.position = 0
        self.token_ids = array("i")
        self.wake_at = 1
        self.has_news = False
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprob_messages: list[TokenLogprobs] = []

        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.retry_after_s = 0.0

        self.arrival_time = request.arrival_time
        self.queued_time = 0.0
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.finish_time = 0.0

        self._detokenizer = detokenizer
        self._text = ""
        self._num_read = 0

    @property
    def request_index(self) -> int:
        """What its core knows it by; a new number each time it is submitted."""
        return self.request.request_index

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids)

    def resubmission(self, request_index: int) -> EngineCoreRequest:
        """The request for the tokens that are still missing, for a core that does not have the sequence."""
        self._note_progress()
        self.request = msgspec.structs.replace(
            self.request,
            request_index=request_index,
            is_resubmitted=self.was_accepted,
            was_index=self.request_index,
        )
        return self.request

    def accuse(self, *, is_suspect: bool) -> None:
        """The replica was lost while it computed this sequence. A suspect had got no token since it was admitted."""
        self._note_progress()
        self.was_accepted = True
        self.num_losses += 1
        self.request.is_suspect |= is_suspect or self.num_losses > 1

    def accuse_silently(self) -> None:
        """The core that it was sent to died and named no requests. A death while it was alone counts for its group."""
        is_accused = not self.has_got_further
        was_alone = self.is_silent_suspect
        self._note_progress()
        self.num_silent_deaths += is_accused
        self.request.is_suspect |= self.is_silent_suspect
        if is_accused and was_alone:
            for sibling in self.group.sequences:
                if sibling.is_silent_suspect:
                    sibling.num_silent_deaths = self.num_silent_deaths

    @property
    def is_silent_suspect(self) -> bool:
        return self.num_silent_deaths >= SUSPICIOUS_SILENT_DEATHS

    @property
    def has_got_further(self) -> bool:
        """Whether it has got a token since it was last sent, or has ended."""
        return self.finished or len(self.request.output_token_ids) // 4 < self.num_generated_tokens

    def lose_outputs(self) -> bool:
        """Outputs were lost. Returns whether that has happened before, with no token since it was first scheduled."""
        is_stuck = self.num_generated_tokens == self._num_tokens_when_lost
        if self.scheduled_time:
            self._num_tokens_when_lost = self.num_generated_tokens
        return is_stuck

    def _note_progress(self) -> None:
        """Keep what has been generated. A suspect is computed alone, so one that got a token is cleared."""
        request = self.request
        if self.has_got_further:
            self.num_silent_deaths = 0
            if request.is_suspect:
                request.is_suspect = False
                self.num_losses = 0
        request.output_token_ids = self.token_ids.tobytes()

    @property
    def prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """One entry a prompt token, None for the first; None when they were not asked for.

        Complete once the first token has been read.
        """
        if self.params.prompt_logprobs is None:
            return None
        return [None, *decode_logprobs(self.prompt_logprob_messages)]

    def find_stop_string(self, *, ended_by_token: bool) -> str | None:
        """Detokenise what is new; the stop string in it, the tokens after which are dropped.

        `ended_by_token` says that the last token is the one that ended the sequence.
        """
        detokenizer = self._detokenizer
        assert detokenizer is not None
        try:
            self._text += detokenizer.append(self._tokens_with_text(detokenizer, ended_by_token))
        except Exception:
            # The reader could not decode these tokens either; it gets the error instead.
            self._detokenizer = None
            raise
        if detokenizer.stop_reason is not None:
            del self.token_ids[detokenizer.num_tokens :]
            self._detokenizer = None
        return detokenizer.stop_reason

    def read(self) -> Delta:
        """Everything since the last read."""
        token_ids = self.token_ids[self._num_read :].tolist()
        text = self.read_text()
        logprobs = None
        if self.params.logprobs is not None:
            messages, self.logprobs = self.logprobs, []
            logprobs = decode_logprobs(messages)[: len(token_ids)]
        reason = self.finish_reason
        if reason is None:
            return Delta(text, token_ids, logprobs)
        return Delta(
            text,
            token_ids,
            logprobs,
            str(reason),
            self.stop_reason,
            self.error,
            self.retry_after_s,
        )

    def read_text(self) -> str:
        """The text since the last read, where nothing else of a `Delta` is needed."""
        num_tokens = self._num_read = len(self.token_ids)
        self.wake_at = num_tokens + self.group.stream_interval
        self.has_news = False
        text, self._text = self._text, ""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return text
        if self.finish_reason is None:
            if detokenizer.num_tokens == num_tokens - 1:
                return text + detokenizer.append_one(self.token_ids[-1])
            return text + detokenizer.append(self.token_ids[detokenizer.num_tokens :])
        self._detokenizer = None
        new = self._tokens_with_text(detokenizer, self.finish_reason is FinishReason.STOP)
        return text + detokenizer.append(new, finished=True)

    def _tokens_with_text(
        self, detokenizer: IncrementalDetokenizer, ended_by_token: bool
    ) -> array[int]:
        """The new tokens but for one that ended the sequence: it is not part of the text."""
        end = len(self.token_ids)
        if ended_by_token and not self.params.include_stop_str_in_output:
            end -= 1
        return self.token_ids[detokenizer.num_tokens : end]


class RequestGroup:
    """The sequences of one request, `num_outputs` of each prompt.

    It has one reader: a task that calls `next` or `result`, or the callback `on_news`, which calls `take_news`.
    """

    __slots__ = (
        "_num_outputs",
        "_on_abort",
        "_waiter",
        "deadline_timer",
        "news",
        "num_unfinished",
        "on_news",
        "request_id",
        "sequences",
        "stream_interval",
    )

    def __init__(
        self,
        request_id: str,
        sequences: list[Sequence],
        num_outputs: list[int],
        *,
        stream_interval: int,
        on_abort: Callable[[RequestGroup], None],
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self._num_outputs = num_outputs
        self.stream_interval = stream_interval
        self.num_unfinished = len(sequences)
        self.news: list[Sequence] = []
        self.on_news: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_abort = on_abort
        self.deadline_timer: asyncio.TimerHandle | None = None
        for position, sequence in enumerate(sequences):
            sequence.group = self
            sequence.position = position

    def outputs_by_prompt(self) -> Iterator[list[Sequence]]:
        start = 0
        for count in self._num_outputs:
            yield self.sequences[start : start + count]
            start += count

    async def next(self) -> list[Sequence]:
        """Wait until something is new; the sequences to read it from, [] once all ends have been taken.

        The first token of a sequence and its end come at once, the others every `stream_interval`.
        """
        while not self.news:
            if not self.num_unfinished:
                return []
            await self._wait()
        return self.take_news()

    def take_news(self) -> list[Sequence]:
        """The sequences with something new. The caller must read them all now."""
        news, self.news = self.news, []
        return news

    async def result(self) -> list[Delta]:
        """Wait until every sequence has ended; one Delta each of all that was not read before."""
        for sequence in self.sequences:
            sequence.wake_at = ONLY_WHEN_FINISHED
        while self.num_unfinished:
            await self._wait()
        self.news = []
        return [sequence.read() for sequence in self.sequences]

    def abort(self) -> None:
        """End what has not ended with the reason "abort"; nothing happens after the end."""
        if self.num_unfinished:
            self._on_abort(self)

    def sequence_ended(self) -> None:
        self.num_unfinished -= 1
        if not self.num_unfinished and self.deadline_timer is not None:
            self.deadline_timer.cancel()

    def wake(self) -> None:
        """Let the task that waits go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
