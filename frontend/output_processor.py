"""Applies what the cores report to the sequences that wait for it.

This runs once for every token that the server generates, so a message is handled as a whole: one
decoding of its arrays, one pass over its tokens, one wake-up for all requests that have news.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Final, NamedTuple

from ..protocol.arrays import int32_list
from ..protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvent,
)
from .core_load import CoreLoad
from .metrics import REJECTIONS, Metrics
from .request_group import FAILURES, RequestGroup, Sequence

logger = logging.getLogger(__name__)

DEADLINE: Final = "deadline"
"""The stop reason of a sequence that its deadline cut short."""


class _Rows(NamedTuple):
    """The sequence of each row of a message, None for one that is no longer here. `watched` have stop strings."""

    request_indices: bytes
    sequences: list[Sequence | None]
    watched: list[Sequence]


class OutputProcessor:
    """Owns the sequences in flight, by request index.

    `abort` is called for a sequence that ended here while its core still generates.
    """

    def __init__(self, metrics: Metrics, abort: Callable[[Sequence], None]) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._metrics = metrics
        self._abort = abort
        self._woken: list[RequestGroup] = []
        self._last_rows: dict[int, _Rows] = {}
        """The rows of each core's last message; the next mostly has the same. Cleared when a sequence leaves."""

    def process(self, outputs: EngineCoreOutputs) -> None:
        """Apply one message; what belongs to unknown or ended sequences is ignored.

        Raises ValueError, having changed nothing, for arrays that do not fit together.
        """
        rows = self._find_rows(outputs)
        token_ids = _token_ids(outputs, len(rows.sequences))
        ended = int32_list(outputs.finished_set)
        events = [event for group in outputs.events for event in group.split()]
        for event in events:
            self._apply_event(event)
        for message in outputs.logprobs:
            if (sequence := self.sequences.get(message.request_index)) is not None:
                sequence.logprobs.append(message)
        for message in outputs.prompt_logprobs:
            if (sequence := self.sequences.get(message.request_index)) is not None:
                sequence.prompt_logprob_messages.append(message)
        if token_ids:
            self._append_tokens(outputs, _owners(outputs, rows.sequences), token_ids)
        if rows.watched:
            self._find_stop_strings(
                rows.watched, {done.request_index: done for done in outputs.finished}
            )
        for done in outputs.finished:
            if (sequence := self.sequences.get(done.request_index)) is not None:
                self._finish_as_reported(sequence, done)
        for request_index in ended:
            if (sequence := self.sequences.get(request_index)) is not None:
                self.finish(sequence, FinishReason.ERROR, error="the engine lost this request")
        if outputs.stats is not None:
            self._metrics.record_stats(outputs.core_index, outputs.stats)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence that is in flight; its core may still be computing it."""
        self._remove(sequence)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        sequence.finish_time = time.monotonic()
        self._leave_queue(sequence)
        sequence.load.finished(sequence.block_keys)
        self._metrics.record_finished(sequence)
        sequence.group.num_unfinished -= 1
        if not sequence.group.num_unfinished:
            self._metrics.record_group(sequence.group)
        self._have_news([sequence])

    def move(self, sequence: Sequence, core_index: int, load: CoreLoad) -> None:
        """A sequence goes on at another core."""
        self._leave_queue(sequence)
        sequence.load.moved_away(sequence.block_keys)
        load.submitted(sequence.num_prompt_tokens, sequence.block_keys)
        if sequence.scheduled_time:
            load.left_queue(sequence.num_prompt_tokens, was_queued=False)
        else:
            sequence.queued_time = 0.0
        sequence.core_index, sequence.load = core_index, load

    def resubmit(self, sequence: Sequence, request_index: int) -> EngineCoreRequest:
        """The request by which a sequence goes on, under a new index: outputs under the old one are ignored."""
        self._remove(sequence)
        request = sequence.resubmission(request_index)
        self.sequences[request_index] = sequence
        return request

    def _remove(self, sequence: Sequence) -> None:
        del self.sequences[sequence.request_index]
        self._last_rows.clear()

    def fail(self, sequences: Iterable[Sequence], error: str) -> None:
        for sequence in list(sequences):
            self.finish(sequence, FinishReason.ERROR, error=error)

    def _have_news(self, sequences: list[Sequence]) -> None:
        """Wake their readers with all others, once the message has been applied."""
        if sequences and not self._woken:
            asyncio.get_running_loop().call_soon(self._wake_readers)
        for sequence in sequences:
            group = sequence.group
            if not sequence.has_news:
                sequence.has_news = True
                group.news.append(sequence)
            self._woken.append(group)

    def _wake_readers(self) -> None:
        woken, self._woken = self._woken, []
        for group in woken:
            if group.on_news is not None:
                group.on_news()
            else:
                group.wake()

    def _find_rows(self, outputs: EngineCoreOutputs) -> _Rows:
        rows = self._last_rows.get(outputs.core_index)
        if rows is None or rows.request_indices != outputs.request_indices:
            sequences = list(map(self.sequences.get, int32_list(outputs.request_indices)))
            watched = [s for s in sequences if s is not None and s.has_stop_strings]
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
        news: list[Sequence] = []
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
                    self._metrics.record_first_token(sequence)
            if len(tokens) >= sequence.wake_at and not sequence.has_news:
                news.append(sequence)
        self._have_news(news)
        if num_tokens:
            self._metrics.record_tokens(outputs.core_index, num_tokens, intervals)

    def _find_stop_strings(
        self, watched: list[Sequence], finished: dict[int, FinishedRequest]
    ) -> None:
        for sequence in watched:
            done = finished.get(sequence.request_index)
            try:
                stop = sequence.find_stop_string(
                    ended_by_token=done is not None and done.reason is FinishReason.STOP
                )
            except Exception:
                logger.exception("request %s: detokenisation failed", sequence.group.request_id)
                self.finish(sequence, FinishReason.ERROR, error="the tokens could not be decoded")
                self._abort(sequence)
                continue
            if stop is not None:
                self.finish(sequence, FinishReason.STOP, stop_reason=stop)
                if done is None:
                    self._abort(sequence)

    def _finish_as_reported(self, sequence: Sequence, done: FinishedRequest) -> None:
        if done.reason is FinishReason.EXPIRED and sequence.num_generated_tokens:
            self.finish(sequence, FinishReason.LENGTH, stop_reason=DEADLINE)
            return
        error = done.message or None
        if error is None and done.reason in FAILURES:
            error = f"the engine ended this request: {done.reason}"
        if rejection := REJECTIONS.get(done.reason):
            self._metrics.record_rejection(sequence.core_index, rejection)
        sequence.retry_after_s = done.retry_after_s
        self.finish(sequence, done.reason, stop_reason=done.stop_reason, error=error)

    def _apply_event(self, event: RequestEvent) -> None:
        sequence = self.sequences.get(event.request_index)
        if sequence is None:
            return
        if event.kind is EventKind.QUEUED and not sequence.queued_time:
            sequence.queued_time = event.timestamp
            sequence.load.queued()
        elif event.kind is EventKind.SCHEDULED and not sequence.scheduled_time:
            self._leave_queue(sequence)
            sequence.scheduled_time = event.timestamp
            sequence.num_cached_tokens = event.num_cached_tokens

    def _leave_queue(self, sequence: Sequence) -> None:
        if not sequence.scheduled_time:
            sequence.load.left_queue(
                sequence.num_prompt_tokens, was_queued=bool(sequence.queued_time)
            )


def _token_ids(outputs: EngineCoreOutputs, num_rows: int) -> list[int]:
    """The tokens of all rows. Raises ValueError if there are not as many as the rows should have."""
    token_ids = int32_list(outputs.token_ids)
    if not outputs.num_tokens:
        if len(token_ids) != num_rows:
            raise ValueError(f"{len(token_ids)} tokens for {num_rows} requests")
        return token_ids
    counts = int32_list(outputs.num_tokens)
    if len(counts) != num_rows or min(counts) < 0 or sum(counts) != len(token_ids):
        raise ValueError(f"counts of {len(token_ids)} tokens do not fit {num_rows} requests")
    return token_ids


def _owners(
    outputs: EngineCoreOutputs, sequences: list[Sequence | None]
) -> Iterable[Sequence | None]:
    """The sequence of each token."""
    if not outputs.num_tokens:
        return sequences
    return chain.from_iterable(map(repeat, sequences, int32_list(outputs.num_tokens)))
