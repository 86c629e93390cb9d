"""The sequences of one request, and their outputs as the request's handler reads them.

Tokens are stored as they arrive and converted to text when the handler reads them, so a slow client costs only a list
of integers. Only sequences with stop strings are detokenized immediately.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final

import msgspec

from ...protocol.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from ...protocol.sampling_params import SamplingParams
from ..observability.tracing.request_trace import Recovery, RequestTrace
from ..tokenizer.detokenizer import IncrementalDetokenizer
from .groups.hidden_states import CollectedStates, complete_states
from .groups.recording import Recording
from .groups.repetition import REPETITION, RepetitionSearch
from .logprobs import Logprobs, PositionLogprobs, iterate_logprobs
from .replicas.core_load import CoreLoad
from .sequence_io import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE, UNLIMITED, Delta, FastStream

SUSPICIOUS_SILENT_CRASHES: Final = 2
"""Number of silent core crashes after which a sequence is computed alone."""


class Sequence:
    """One prompt and its continuation: tokens, finish state, and times for the metrics.

    Times are CLOCK_MONOTONIC seconds, 0.0 until known. All but `arrival_time` and `finish_time` come from the core.

    Attributes:
        fast_stream: Called with new output before the group's reader, if it is set.
        token_ids: All generated tokens. The reader is woken when their number reaches `wake_at`.
        scheduler_time, core_time: Seconds of the scheduler, and of CPU cores or GPUs; 0.0 if the frontend ended it.
        epoch: The epoch of the core that the sequence was last sent to; 0 for none.
        routing_keys: Keys of the prompt blocks and of the LoRA adapter, if there are several replicas.
        was_accepted: True if a core has confirmed the sequence.
        num_drafts, num_drafted_tokens: Drafts that were verified, and generated tokens that were accepted ones.
        num_losses: Replicas lost while computing the sequence, since it was last cleared of suspicion.
        num_accepted_predictions, num_rejected_predictions: Drafted tokens of the client's prediction.
        recoveries: The core crashes that the sequence survived.
        num_silent_crashes: Consecutive cores that exited with the sequence, without a token of it or a final message.
        is_pinned: True if the client chose the replica.
        is_watched: True if `find_end` may end the sequence.
    """

    __slots__ = (
        "_detokenizer",
        "_num_tokens_when_lost",
        "_repetition",
        "_text",
        "arrival_time",
        "core_index",
        "core_time",
        "epoch",
        "error",
        "fast_stream",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "group",
        "has_updates",
        "is_pinned",
        "is_watched",
        "kv_transfer_params",
        "last_token_time",
        "load",
        "logprobs",
        "max_tokens",
        "num_accepted_predictions",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_drafts",
        "num_loaded_tokens",
        "num_losses",
        "num_preemptions",
        "num_prompt_tokens",
        "num_read_tokens",
        "num_rejected_predictions",
        "num_silent_crashes",
        "params",
        "pooled",
        "position",
        "prompt_logprob_messages",
        "queued_time",
        "recoveries",
        "request",
        "retry_after_s",
        "routing_keys",
        "scheduled_time",
        "scheduler_time",
        "states",
        "stop_reason",
        "stream_interval",
        "token_ids",
        "trace_headers",
        "updates",
        "wake_at",
        "was_accepted",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        num_prompt_tokens: int,
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        self.request = request
        self.routing_keys: list[int] = []
        self.num_losses = self.num_silent_crashes = self.num_preemptions = self.epoch = 0
        self.num_accepted_predictions = self.num_rejected_predictions = self.num_drafts = 0
        self.was_accepted = self.is_pinned = self.has_updates = False
        self.core_index = self._num_tokens_when_lost = -1
        self.load: CoreLoad
        self.params, self.num_prompt_tokens = params, num_prompt_tokens
        self.max_tokens = request.sampling_params.max_tokens
        self.num_cached_tokens = self.num_loaded_tokens = self.num_computed_tokens = 0
        self._repetition = RepetitionSearch.from_params(params)
        self.is_watched = bool(params.stop or params.stop_regex) or self._repetition is not None
        self.recoveries: tuple[Recovery, ...] = ()
        self.group: RequestGroup
        self.updates: list[Sequence]
        self.stream_interval: int
        self.position = self.num_read_tokens = self.num_drafted_tokens = 0
        self.token_ids, self.wake_at = array("i"), 1
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprob_messages: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.kv_transfer_params: dict[str, object] | None = None
        self.trace_headers = request.trace_headers
        self.arrival_time = request.arrival_time
        self.queued_time = self.scheduled_time = self.scheduler_time = self.core_time = 0.0
        self.first_token_time = self.last_token_time = self.finish_time = self.retry_after_s = 0.0
        self._detokenizer = detokenizer
        self._text, self.pooled = "", b""
        self.states: CollectedStates | None = None
        self.fast_stream: FastStream | None = None

    def assign(self, core_index: int, load: CoreLoad, routing_keys: list[int]) -> None:
        """Set the core that computes the sequence."""
        self.core_index, self.load, self.routing_keys = core_index, load, routing_keys

    @property
    def request_index(self) -> int:
        """The request's number at the core. Each submission has a new number."""
        return self.request.request_index

    @property
    def finished(self) -> bool:
        """True if the sequence has finished."""
        return self.finish_reason is not None

    @property
    def lora_name(self) -> str:
        """The name of the LoRA adapter; "" for the base model."""
        return "" if self.request.lora is None else self.request.lora.name

    @property
    def num_generated_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.token_ids)

    def resubmission(self, request_index: int) -> EngineCoreRequest:
        """Return the request for the remaining tokens, for a core that has not received the sequence before."""
        self._record_progress()
        self.request = msgspec.structs.replace(
            self.request,
            request_index=request_index,
            is_resubmitted=self.was_accepted,
            was_index=self.request_index,
        )
        return self.request

    def mark_suspected(self, *, is_suspect: bool) -> None:
        """Record that the replica was lost while computing this sequence.

        `is_suspect` means that the sequence got no token since the replica admitted it.
        """
        self._record_progress()
        self.was_accepted = True
        self.num_losses += 1
        self.request.is_suspect |= is_suspect or self.num_losses > 1

    def suspect_after_silent_crash(self) -> None:
        """Record that the sequence's core exited without a message that names its requests.

        If the sequence was computed alone, the other sequences of its group become suspects too.
        """
        is_suspected = not self.has_progressed
        was_alone = self.is_silent_suspect
        self._record_progress()
        self.num_silent_crashes += is_suspected
        self.request.is_suspect |= self.is_silent_suspect
        if is_suspected and was_alone:
            for sibling in self.group.sequences:
                if sibling.is_silent_suspect:
                    sibling.num_silent_crashes = self.num_silent_crashes

    @property
    def is_silent_suspect(self) -> bool:
        """True if the sequence must be computed alone, because too many cores crashed unexplained while they had it."""
        return self.num_silent_crashes >= SUSPICIOUS_SILENT_CRASHES

    @property
    def has_progressed(self) -> bool:
        """True if the sequence got a token since it was last sent to a core, or has finished."""
        return self.finished or len(self.request.output_token_ids) // 4 < self.num_generated_tokens

    def lose_outputs(self) -> bool:
        """Record that outputs were lost. Return True if it is the second time without a new token in between."""
        before = self._num_tokens_when_lost
        if self.scheduled_time:
            self._num_tokens_when_lost = self.num_generated_tokens
        return self.num_generated_tokens == before

    def _record_progress(self) -> None:
        """Store the generated tokens in the request. A suspect runs alone, so a new token clears it."""
        request = self.request
        if self.has_progressed:
            self.num_silent_crashes = 0
            if request.is_suspect:
                request.is_suspect, self.num_losses = False, 0
        request.output_token_ids = self.token_ids.tobytes()

    def iterate_prompt_logprobs(self) -> Iterator[PositionLogprobs | None]:
        """Yield one entry per prompt token, None for the first, once the first token of the output was read."""
        yield None
        yield from iterate_logprobs(self.prompt_logprob_messages)

    @property
    def weight(self) -> int:
        """The approximate size of the response in elements, such as tokens and logprob entries."""
        messages = chain(self.logprobs, self.prompt_logprob_messages)
        num_logprobs = sum(len(message.token_ids) // 4 for message in messages)
        num_values = 0 if self.states is None else self.states.num_values
        return 1 + len(self.token_ids) + num_logprobs + num_values

    def find_end(self, reported: FinishReason | None) -> tuple[FinishReason, str] | None:
        """Return the finish reason and stop reason if new tokens complete a stop string or a repetition.

        Later tokens are dropped. `reported` is the core's finish reason, if it has sent the last token.
        """
        search, detokenizer = self._repetition, self._detokenizer
        repeats = search is not None and search.cut(self.token_ids, has_ended=reported is not None)
        if self.params.stop or self.params.stop_regex:
            assert detokenizer is not None
            by_token = reported is FinishReason.STOP and not repeats
            try:
                self._text += detokenizer.append(self._tokens_with_text(detokenizer, by_token))
            except Exception:
                # The reader will fail to decode these tokens as well, and report the error.
                self._detokenizer = None
                raise
            if detokenizer.stop_reason is not None:
                del self.token_ids[detokenizer.num_tokens :]
                self._detokenizer = None
                return FinishReason.STOP, detokenizer.stop_reason
        return (FinishReason.REPETITION, REPETITION) if repeats else None

    def read(self) -> Delta:
        """Return all output since the last read, and mark it as read."""
        token_ids = self.token_ids[self.num_read_tokens :].tolist()
        text = self.read_text(UNLIMITED)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs, self.logprobs = Logprobs(self.logprobs, len(token_ids)), []
        if (reason := self.finish_reason) is None:
            return Delta(text, token_ids, logprobs)
        ending = (str(reason), self.stop_reason, self.error, self.retry_after_s)
        return Delta(text, token_ids, logprobs, *ending)

    def read_some(self, max_tokens: int = TOKENS_AT_ONCE) -> Delta:
        """Return the new output, or a first part of it if it has more than `max_tokens` or would take long to read.

        After a part, the group returns the sequence again for the rest.
        """
        params, limit = self.params, max_tokens
        if params.logprobs is not None:
            num_entries = 1 + params.logprobs + len(params.logprob_token_ids)
            is_limited = params.logprobs >= 0  # -1 requests the whole vocabulary.
            limit = min(limit, max(1, LOGPROBS_AT_ONCE // num_entries) if is_limited else 1)
        if len(self.token_ids) - self.num_read_tokens > limit:
            return self._read_part(limit)
        return self.read()

    def _read_part(self, num_tokens: int) -> Delta:
        """Return output with about `num_tokens` new tokens. The group returns the sequence again for the rest."""
        logprobs = None
        if self.params.logprobs is not None:
            num_positions = num_messages = 0
            while num_positions < num_tokens and num_messages < len(self.logprobs):
                num_positions += self.logprobs[num_messages].num_positions
                num_messages += 1
            num_new = len(self.token_ids) - self.num_read_tokens
            num_tokens = min(num_positions or num_tokens, num_new)
            logprobs = Logprobs(self.logprobs[:num_messages], num_tokens)
            del self.logprobs[:num_messages]
        start = self.num_read_tokens
        end = self.num_read_tokens = start + num_tokens
        text, self._text = self._text, ""
        detokenizer = self._detokenizer
        is_end = self.finish_reason is FinishReason.STOP and end == len(self.token_ids)
        if detokenizer is not None and detokenizer.num_tokens < end and not is_end:
            text += detokenizer.append(self.token_ids[detokenizer.num_tokens : end])
        self.wake_at = end + self.stream_interval
        self.has_updates = True
        self.updates.append(self)
        return Delta(text, self.token_ids[start:end].tolist(), logprobs)

    def read_text(self, max_tokens: int = TOKENS_AT_ONCE) -> str:
        """Return the new text, for callers that need no other field of a `Delta`.

        If there are more than `max_tokens` new tokens, return the text of the first ones. The group then returns the
        sequence again for the rest.
        """
        num_tokens = len(self.token_ids)
        if num_tokens - self.num_read_tokens > max_tokens:
            return self._read_part(max_tokens).text
        self.num_read_tokens = num_tokens
        self.wake_at = num_tokens + self.stream_interval
        self.has_updates = False
        text, self._text = self._text, ""
        if (detokenizer := self._detokenizer) is None:
            return text
        if self.finish_reason is None:
            return text + detokenizer.append(self.token_ids[detokenizer.num_tokens :])
        self._detokenizer = None
        new = self._tokens_with_text(detokenizer, self.finish_reason is FinishReason.STOP)
        return text + detokenizer.append(new, finished=True)

    def read_as_json(self) -> bytes:
        """Return the text of `read_text` as JSON without quotes."""
        num_tokens, detokenizer = len(self.token_ids), self._detokenizer
        is_one = num_tokens - self.num_read_tokens == 1 and self.finish_reason is None
        text = detokenizer.append_as_json(self.token_ids[-1]) if is_one and detokenizer else None
        if text is None:
            return msgspec.json.encode(self.read_text())[1:-1]
        self.num_read_tokens, self.has_updates = num_tokens, False
        self.wake_at = num_tokens + self.stream_interval
        return text

    def _tokens_with_text(
        self, detokenizer: IncrementalDetokenizer, ended_by_token: bool
    ) -> array[int]:
        """Return the new tokens that have text: all but the token that ended the sequence."""
        end = len(self.token_ids)
        if ended_by_token and not self.params.include_stop_str_in_output:
            end -= 1
        return self.token_ids[detokenizer.num_tokens : end]


class RequestGroup:
    """The sequences of one request, with `num_outputs` of them per prompt.

    A group has one reader: a task that calls `wait_for_updates` or `result`, or the callback `on_update`. The callback
    calls `take_updates`, and returns True to be called again. `wake_soon` schedules a turn of the reader.
    """

    __slots__ = (
        "_num_outputs",
        "_on_abort",
        "_waiter",
        "_wake_soon",
        "deadline_timer",
        "is_woken",
        "num_unfinished",
        "on_update",
        "recording",
        "request_id",
        "sequences",
        "trace",
        "updates",
    )

    def __init__(
        self,
        request_id: str,
        sequences: list[Sequence],
        num_outputs: list[int],
        *,
        stream_interval: int,
        on_abort: Callable[[RequestGroup], None],
        wake_soon: Callable[[RequestGroup], None],
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self._num_outputs = num_outputs
        self.num_unfinished = len(sequences)
        self.updates: list[Sequence] = []
        self.on_update: Callable[[], bool] | None = None
        self.is_woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_abort = on_abort
        self._wake_soon = wake_soon
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.recording: Recording | None = None
        self.trace: RequestTrace | None = None
        for position, sequence in enumerate(sequences):
            sequence.group, sequence.updates, sequence.position = self, self.updates, position
            sequence.stream_interval = stream_interval

    def outputs_by_prompt(self) -> Iterator[list[Sequence]]:
        """Yield the sequences of each prompt, in the order of the prompts."""
        sequences = iter(self.sequences)
        for count in self._num_outputs:
            yield list(islice(sequences, count))

    async def wait_for_updates(self) -> list[Sequence]:
        """Wait for new output. Return the sequences to read, or [] when all have finished and were returned.

        The first token and the end of a sequence are reported immediately, other tokens in groups of `stream_interval`.
        """
        while not self.updates:
            if not self.num_unfinished:
                return []
            await self._wait()
        return self.take_updates()

    def take_updates(self) -> list[Sequence]:
        """Return all sequences with new output. The caller must read them now or give them back."""
        taken = self.updates.copy()
        self.updates.clear()
        return taken

    def give_back(self, unread: list[Sequence]) -> None:
        """Return sequences that were not read. They come before the sequences with newer output."""
        self.updates[:0] = unread

    async def result(self) -> list[Delta]:
        """Wait until every sequence has finished. Return one Delta per sequence with all output not read before."""
        await self.wait_for_end()
        return self.read_all()

    async def wait_for_end(self) -> None:
        """Wait until every sequence has finished."""
        for sequence in self.sequences:
            sequence.wake_at = UNLIMITED
        while self.num_unfinished:
            await self._wait()
        await complete_states(self.sequences)
        self.updates.clear()

    def read_all(self) -> list[Delta]:
        """Return one Delta per sequence; all must have finished. May be called from any thread."""
        return [sequence.read() for sequence in self.sequences]

    @property
    def weight(self) -> int:
        """The approximate size of the complete response in elements."""
        return sum(sequence.weight for sequence in self.sequences)

    def abort(self) -> None:
        """End all unfinished sequences with the reason "abort". This does nothing after the end."""
        if self.num_unfinished:
            self._on_abort(self)

    def leave(self) -> None:
        """End the request, because its client has disconnected. A recorded request may continue for a grace period."""
        if self.num_unfinished and self.recording is not None:
            self.recording.record_departure()
        else:
            self.abort()
            self.updates.clear()

    def record_sequence_end(self, sequence: Sequence) -> None:
        """Record that one of the sequences has finished, which may be read but no longer has a group."""
        # The cycle would keep all objects of the request until a garbage collection.
        del sequence.group
        self.num_unfinished -= 1
        if self.recording is not None:
            self.recording.record_end(sequence.position)
        if self.num_unfinished:
            return
        if self.deadline_timer is not None:
            self.deadline_timer.cancel()
        if self.trace is not None:
            self.trace.record_group(self)

    def wake_soon(self) -> None:
        """Schedule a turn of the reader."""
        self._wake_soon(self)

    def wake(self) -> None:
        """Wake the waiting reader task."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
