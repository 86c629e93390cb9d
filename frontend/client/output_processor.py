"""Apply the outputs of the cores to the unfinished sequences.

This is the hot path of a frontend: it handles every token that the server generates. So a message is processed as a
whole, with one decoding of its arrays, one pass over its tokens, and one wake-up for all requests with new output.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ...protocol.arrays import float32_bytes, int32_list, int32_view
from ...protocol.messages import (
    F32,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvent,
)
from ..observability.metrics.metrics import Metrics
from ..observability.metrics.names import REJECTIONS
from ..observability.tracing.request_trace import Recovery, end_recovery
from .groups.hidden_states import end_states
from .groups.recent_requests import RecentRequest, RecentRequests
from .groups.step_arrays import owners_of, times_of, token_ids_of
from .replicas.core_load import CoreLoad
from .request_group import RequestGroup, Sequence
from .sequence_io import FastStream

logger = logging.getLogger(__name__)

WAKE_S: Final = 0.005
"""Seconds for which readers run before other callbacks. One turn of a reader takes up to `WRITE_S`."""

STREAMS_AT_ONCE: Final = 256
"""Number of streams that are written before other callbacks run; writing takes about 2 ms."""

MAX_DELIVERY_TIMES: Final = 32
"""Maximum delivery times that are kept until the next request."""

FAILURES: Final = frozenset(FinishReason) - {
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.MOVED,
    FinishReason.REPETITION,
}
"""The finish reasons that come with an error message."""

DEADLINE: Final = "deadline"
"""The stop reason of a sequence that was cut short by its deadline."""


class _Rows(NamedTuple):
    """The sequence of each row of a core's message; None for a removed sequence.

    `watched` lists the sequences that this process ends, because of their text or repetitions.
    """

    request_indices: bytes
    sequences: list[Sequence | None]
    watched: list[Sequence]


class OutputProcessor:
    """Owns the unfinished sequences, by request index.

    `abort` is called for a sequence that finished in this process while its core still generates, and `on_end` for each
    sequence that finished.
    """

    def __init__(
        self,
        metrics: Metrics,
        abort: Callable[[Sequence], None],
        on_end: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._recent_requests = RecentRequests()
        self._metrics = metrics
        self._abort, self._on_end = abort, on_end
        self._streamed: deque[Sequence] = deque()
        self._encoded: deque[tuple[FastStream, bytes]] = deque()
        """The sequences whose streams write new output before their readers are woken."""
        self._woken: deque[RequestGroup] = deque()
        self._is_wake_scheduled = False
        self._delivery_times: deque[float] = deque(maxlen=MAX_DELIVERY_TIMES)
        self._unsent_since = 0.0
        """The time at which the core sent the tokens that readers have not written yet; 0.0 if there are none."""
        self._recovering: list[Sequence] = []
        """The sequences that received no token since their core was lost."""
        self._last_rows: dict[int, _Rows] = {}
        """The rows of each core's last message, because the next message usually has the same rows.

        An entry is cleared when one of its sequences is removed.
        """

    def list_recent_requests(self) -> list[RecentRequest]:
        """Return the requests that ended last, then the unfinished ones, at most `MAX_REQUESTS` of each."""
        return self._recent_requests.list(s.group for s in self.sequences.values())

    def take_delivery_times(self) -> F32:
        """Remove and return the latest delivery times: float32 seconds from a step's output to its write."""
        times = float32_bytes(list(self._delivery_times))
        self._delivery_times.clear()
        return times

    def process(self, outputs: EngineCoreOutputs) -> None:
        """Apply one message. Entries for unknown or finished sequences are ignored.

        Raises:
            ValueError: The sizes of the arrays do not match. Nothing was changed.
        """
        rows = self._find_rows(outputs)
        token_ids = token_ids_of(outputs, len(rows.sequences))
        ended = int32_list(outputs.finished_set)
        scheduler_times = times_of(outputs.scheduler_times, len(ended))
        core_times = times_of(outputs.core_times, len(ended))
        # Most messages have only tokens, and numpy takes long if it is called once per step.
        counts = outputs.prediction_counts
        predictions = int32_view(counts).reshape(-1, 3).tolist() if counts else []
        counts = outputs.draft_counts
        drafts = int32_view(counts).reshape(-1, 2).tolist() if counts else []
        events = [event for group in outputs.events for event in group.split()]
        for event in events:
            self._apply_event(event)
        for message in outputs.logprobs:
            if (sequence := self.sequences.get(message.request_index)) is not None:
                sequence.logprobs.append(message)
        for message in outputs.prompt_logprobs:
            if (sequence := self.sequences.get(message.request_index)) is not None:
                sequence.prompt_logprob_messages.append(message)
        for vector in outputs.pooled:
            if (sequence := self.sequences.get(vector.request_index)) is None:
                continue
            if sequence.states is None:
                sequence.pooled = vector.vector
            else:
                sequence.states.add(vector.first, vector.vector)
        for request_index, num_accepted, num_rejected in predictions:
            if (sequence := self.sequences.get(request_index)) is not None:
                sequence.num_accepted_predictions += num_accepted
                sequence.num_rejected_predictions += num_rejected
        for request_index, num_drafts in drafts:
            if (sequence := self.sequences.get(request_index)) is not None:
                sequence.num_drafts += num_drafts
        if token_ids:
            self._unsent_since = outputs.timestamp
            self._append_tokens(outputs, owners_of(outputs, rows.sequences), token_ids)
            if self._recovering:
                self._end_recoveries(outputs.timestamp)
        if rows.watched:
            self._find_ends(rows.watched, {done.request_index: done for done in outputs.finished})
        if scheduler_times:
            counted_times = []
            for request_index, seconds in zip(ended, scheduler_times, strict=True):
                sequence = self.sequences.get(request_index)
                if sequence is None or not sequence.request.is_warm_up:
                    counted_times.append(seconds)
                if sequence is not None:
                    sequence.scheduler_time = seconds
            self._metrics.record_scheduler_times(outputs.core_index, counted_times)
        for request_index, seconds in zip(ended, core_times, strict=False):
            if (sequence := self.sequences.get(request_index)) is not None:
                sequence.core_time = seconds
        for done in outputs.finished:
            if (sequence := self.sequences.get(done.request_index)) is not None:
                self.finish_as_reported(sequence, done)
        for request_index in ended:
            if (sequence := self.sequences.get(request_index)) is not None:
                self.finish(
                    sequence, FinishReason.ERROR, error="the engine lost this request; retry it"
                )
        if outputs.stats is not None:
            self._metrics.record_stats(outputs.core_index, outputs.stats, outputs.timestamp)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        outcome: FinishReason | None = None,
    ) -> None:
        """Finish a sequence. Its core may still be computing it.

        Args:
            sequence: An unfinished sequence.
            reason: The finish reason that the client receives.
            stop_reason: The stop string or token.
            error: The error message for the client.
            outcome: The finish reason for metrics, if it differs from `reason`.
        """
        self._remove(sequence)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        if sequence.states is not None:
            end_states(sequence, reason)
        sequence.finish_time = time.monotonic()
        self._leave_queue(sequence)
        sequence.load.record_finished(sequence.routing_keys)
        is_counted = not sequence.request.is_warm_up
        if is_counted:
            self._metrics.record_finished(sequence, reason if outcome is None else outcome)
        self._on_end(sequence)
        self._schedule_wake([sequence])
        group = sequence.group
        group.record_sequence_end(sequence)
        if not group.num_unfinished:
            if is_counted:
                self._metrics.record_group(group.outputs_by_prompt())
            self._recent_requests.record_end(group)

    def expire(self, sequence: Sequence) -> None:
        """Finish a sequence whose deadline has passed without a report from its core."""
        waited_s = time.monotonic() - sequence.arrival_time
        message = f"the deadline passed before any token was generated, {waited_s:.3f} s after the request arrived; set a later deadline"
        expired = FinishedRequest(sequence.request_index, FinishReason.EXPIRED, message=message)
        self.finish_as_reported(sequence, expired)
        self._abort(sequence)

    def move_sequence(self, sequence: Sequence, core_index: int, load: CoreLoad) -> None:
        """Assign a sequence to another core, whose load counter is `load`."""
        self._leave_queue(sequence)
        sequence.load.record_moved(sequence.routing_keys)
        load.record_submitted(sequence.num_prompt_tokens, sequence.routing_keys)
        if sequence.scheduled_time:
            load.record_left_queue(sequence.num_prompt_tokens, was_queued=False)
        else:
            sequence.queued_time = 0.0
        sequence.core_index, sequence.load = core_index, load

    def resubmit(
        self, sequence: Sequence, request_index: int, lost_time: float | None
    ) -> EngineCoreRequest:
        """Return a request that continues a sequence whose core was lost at `lost_time` (CLOCK_MONOTONIC seconds).

        `lost_time` is None if the core was not lost.
        The request has a new index, so that late outputs for the old index are ignored.
        """
        self._remove(sequence)
        is_recovering = bool(sequence.recoveries) and not sequence.recoveries[-1].resumed_time
        if lost_time is not None and sequence.was_accepted and not is_recovering:
            lost = Recovery(max(lost_time, sequence.arrival_time), 0.0, len(sequence.token_ids))
            sequence.recoveries += (lost,)
            self._recovering.append(sequence)
        request = sequence.resubmission(request_index)
        self.sequences[request_index] = sequence
        return request

    def _end_recoveries(self, timestamp: float) -> None:
        """Record the sequences that continue after a crash with the tokens of a message."""
        waiting: list[Sequence] = []
        for sequence in self._recovering:
            if sequence.last_token_time == timestamp:
                sequence.recoveries = end_recovery(sequence.recoveries, timestamp)
            elif not sequence.finished:
                waiting.append(sequence)
        self._recovering = waiting

    def _remove(self, sequence: Sequence) -> None:
        del self.sequences[sequence.request_index]
        self._last_rows.clear()

    def fail_sequences(self, sequences: Iterable[Sequence], error: str) -> None:
        """Finish these sequences with an error."""
        for sequence in list(sequences):
            self.finish(sequence, FinishReason.ERROR, error=error)
            self._abort(sequence)

    def _schedule_wake(self, sequences: list[Sequence]) -> None:
        """Schedule a wake-up of the sequences' readers, for after the whole message has been applied."""
        for sequence in sequences:
            is_new = not sequence.has_updates
            sequence.has_updates = True
            if sequence.fast_stream is None:
                if is_new:
                    sequence.group.updates.append(sequence)
                self._wake(sequence.group)
            elif is_new:
                self._streamed.append(sequence)
        if sequences:
            self._schedule_readers()

    def wake_soon(self, group: RequestGroup) -> None:
        """Wake a group's reader after the other pending callbacks."""
        self._wake(group)
        self._schedule_readers()

    def _wake(self, group: RequestGroup) -> None:
        if not group.is_woken:
            self._woken.append(group)
            group.is_woken = True

    def resume(self) -> None:
        """Wake the readers although a callback that should have done it has failed."""
        self._is_wake_scheduled = False
        self._schedule_readers()

    def _schedule_readers(self) -> None:
        if not self._is_wake_scheduled:
            # In this order, a failure to schedule it is not remembered as a success.
            asyncio.get_running_loop().call_soon(self._wake_readers)
            self._is_wake_scheduled = True

    def _wake_readers(self) -> None:
        """Wake readers one by one, for at most `WAKE_S` in total, and the others after other callbacks have run."""
        self._is_wake_scheduled = False
        end = time.monotonic() + WAKE_S
        streamed, since = self._streamed, self._unsent_since
        try:
            if streamed or self._encoded:
                self._write_streamed()
                if since:
                    self._delivery_times.append(time.monotonic() - since)
            while self._woken:
                group = self._woken[0]
                group.is_woken = False
                if group.on_update is None:
                    group.wake()
                elif group.on_update():
                    self.wake_soon(group)
                self._woken.popleft()
                now = time.monotonic()
                if since:
                    self._delivery_times.append(now - since)
                if now > end:
                    break
        finally:
            # A reader whose turn has failed, for example for lack of memory, gets another.
            if streamed or self._encoded or self._woken:
                self._schedule_readers()
        if not (streamed or self._woken):
            self._unsent_since = 0.0

    def _write_streamed(self) -> None:
        """Write the new output of up to `STREAMS_AT_ONCE` streams, encoded in about `WAKE_S`.

        All is encoded before the first write, which wakes up the client's process.
        """
        encoded = self._encoded
        end = time.monotonic() + WAKE_S
        for _ in range(min(len(self._streamed), STREAMS_AT_ONCE)):
            # Each is removed when it is done, so that `resume` finds those that a failure has interrupted.
            # Without a stream, the reader has left.
            if (stream := self._streamed[0].fast_stream) is not None:
                encoded.append((stream, stream.encode()))
            self._streamed.popleft()
            if time.monotonic() > end:
                break
        while encoded:
            stream, body = encoded[0]
            stream.write(body)
            encoded.popleft()

    def _find_rows(self, outputs: EngineCoreOutputs) -> _Rows:
        rows = self._last_rows.get(outputs.core_index)
        if rows is None or rows.request_indices != outputs.request_indices:
            sequences = list(map(self.sequences.get, int32_list(outputs.request_indices)))
            watched = [s for s in sequences if s is not None and s.is_watched]
            rows = _Rows(outputs.request_indices, sequences, watched)
            self._last_rows[outputs.core_index] = rows
        return rows

    def _append_tokens(
        self,
        outputs: EngineCoreOutputs,
        owners: Iterable[Sequence | None],
        token_ids: list[int],
    ) -> None:
        timestamp = outputs.timestamp
        intervals: list[float] = []
        update: list[Sequence] = []
        num_tokens = 0
        for sequence, token_id in zip(owners, token_ids, strict=True):
            if sequence is None:
                continue
            num_tokens += 1
            tokens = sequence.token_ids
            tokens.append(token_id)
            previous = sequence.last_token_time
            if previous != timestamp:
                sequence.last_token_time = timestamp
                if previous:
                    intervals.append(timestamp - previous)
                else:
                    sequence.first_token_time = timestamp
                    if sequence.request.is_warm_up:
                        num_tokens -= 1
                    else:
                        self._metrics.record_first_token(sequence)
            else:
                sequence.num_drafted_tokens += 1
            if len(tokens) >= sequence.wake_at and not sequence.has_updates:
                update.append(sequence)
        self._schedule_wake(update)
        if num_tokens:
            self._metrics.record_tokens(outputs.core_index, num_tokens, intervals)

    def _find_ends(self, watched: list[Sequence], finished: dict[int, FinishedRequest]) -> None:
        for sequence in watched:
            done = finished.get(sequence.request_index)
            try:
                end = sequence.find_end(None if done is None else done.reason)
            except Exception:
                request_id = sequence.group.request_id
                logger.exception(
                    "request %s: detokenization failed",
                    request_id,
                    extra={"request_id": request_id},
                )
                self.finish(
                    sequence,
                    FinishReason.ERROR,
                    error="the generated tokens could not be decoded; see the server's log",
                )
                self._abort(sequence)
                continue
            if end is not None:
                reason, stop_reason = end
                self.finish(sequence, reason, stop_reason=stop_reason)
                if done is None:
                    self._abort(sequence)

    def finish_as_reported(self, sequence: Sequence, done: FinishedRequest) -> None:
        """Finish a sequence as its core reported."""
        sequence.trace_headers = done.trace_headers or sequence.trace_headers
        if done.reason is FinishReason.EXPIRED and sequence.num_generated_tokens:
            # The client keeps the tokens that were generated so far, as with a token limit.
            self.finish(
                sequence, FinishReason.LENGTH, stop_reason=DEADLINE, outcome=FinishReason.EXPIRED
            )
            return
        error = done.message or None
        if error is None and done.reason in FAILURES:
            error = f"the engine stopped this request with reason {done.reason}"
        if (rejection := REJECTIONS.get(done.reason)) and not sequence.request.is_warm_up:
            self._metrics.record_rejection(sequence.core_index, rejection)
        sequence.retry_after_s = done.retry_after_s
        sequence.kv_transfer_params = done.kv_transfer_params
        self.finish(sequence, done.reason, stop_reason=done.stop_reason, error=error)

    def _apply_event(self, event: RequestEvent) -> None:
        sequence = self.sequences.get(event.request_index)
        if sequence is None:
            return
        if event.kind is EventKind.QUEUED and not sequence.queued_time:
            sequence.queued_time = event.timestamp
            sequence.was_accepted = True
            sequence.load.record_queued()
        elif event.kind is EventKind.SCHEDULED and not sequence.scheduled_time:
            self._leave_queue(sequence)
            sequence.scheduled_time = event.timestamp
            sequence.num_cached_tokens = event.num_cached_tokens
            sequence.num_loaded_tokens = event.num_loaded_tokens
            sequence.num_computed_tokens = event.num_cached_tokens
        elif event.kind is EventKind.PROGRESS:
            sequence.num_computed_tokens = event.num_cached_tokens
            self._schedule_wake([sequence])
        elif event.kind is EventKind.PREEMPTED:
            sequence.num_preemptions += 1

    def _leave_queue(self, sequence: Sequence) -> None:
        if not sequence.scheduled_time:
            sequence.load.record_left_queue(
                sequence.num_prompt_tokens, was_queued=bool(sequence.queued_time)
            )
