"""Collect the events, tokens and ends of requests into one message per client and step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from ...protocol.arrays import Int64Array, int32_bytes, int32_pairs, int32_view
from ...protocol.messages import (
    EngineCoreOutputs,
    EventKind,
    FinishedRequest,
    FinishReason,
    PooledVector,
    RequestEvents,
    SchedulerStats,
    TokenLogprobs,
)
from ..state.batch import Batch, ScheduledRow
from ..state.request import Request

_SCHEDULED: Final = EventKind.SCHEDULED
_BY_CLIENT: Final = (FinishReason.ABORT, FinishReason.MOVED)

_TOO_MANY_LOGPROBS: Final = (
    "the log-probabilities of this request exceed the largest message between processes: "
    "ask for fewer logprobs or fewer tokens"
)
_FAILURE_BYTES: Final = 256
"""Upper bound of the encoded size, in bytes, of the error that replaces a request's log-probabilities."""


class _EventBatch(msgspec.Struct):
    """Requests to which the same event happened at the same time."""

    kind: EventKind
    timestamp: float
    request_indices: list[int]
    num_cached_tokens: list[int]
    num_loaded_tokens: list[int]

    def add_scheduled(self, requests: Sequence[Request]) -> None:
        """Add the cached prompt tokens of requests that were scheduled for the first time."""
        self.num_cached_tokens += [request.num_cached_tokens for request in requests]
        self.num_loaded_tokens += [request.num_loaded_tokens for request in requests]

    def to_message(self) -> RequestEvents:
        has_loaded = any(self.num_loaded_tokens)
        return RequestEvents(
            self.kind,
            self.timestamp,
            array("i", self.request_indices).tobytes(),
            array("i", self.num_cached_tokens).tobytes(),
            array("i", self.num_loaded_tokens).tobytes() if has_loaded else b"",
        )


class Outbox:
    """Collects the events of one client until the next message to it."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []
        self.aborted: list[int] = []
        """Requests that the client aborted. They are reported as finished, without a finish reason."""
        self.event_batches: list[_EventBatch] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prediction_counts: list[tuple[int, int, int]] = []
        self.draft_counts = b""
        self.pooled: list[PooledVector] = []
        self.has_progress = False
        """True if there is progress to report, which does not wait for the next tokens."""
        self._sequence = 0

    def get_event_batch(self, kind: EventKind, now: float) -> _EventBatch:
        """Return the batch of events of this kind and time, to which the caller adds requests."""
        moment = self.event_batches[-1] if self.event_batches else None
        if moment is None or moment.kind is not kind or moment.timestamp != now:
            moment = _EventBatch(kind, now, [], [], [])
            self.event_batches.append(moment)
        return moment

    def flush(
        self, core_index: int, now: float, request_indices: bytes = b"", token_ids: bytes = b""
    ) -> EngineCoreOutputs:
        """Return the next message with the given tokens and all collected events, and start an empty one."""
        outputs = EngineCoreOutputs(core_index, self._sequence, now, request_indices, token_ids)
        self._sequence += 1
        if self.event_batches:
            outputs.events = [moment.to_message() for moment in self.event_batches]
            self.event_batches = []
            self.has_progress = False
        if self.finished or self.aborted:
            ended = [end.request_index for end in self.finished] + self.aborted
            outputs.finished_set = array("i", ended).tobytes()
            outputs.finished, self.finished, self.aborted = self.finished, [], []
        if self.logprobs:
            outputs.logprobs, self.logprobs = self.logprobs, []
        if self.prompt_logprobs:
            outputs.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        if self.prediction_counts:
            outputs.prediction_counts = int32_bytes(self.prediction_counts)
            self.prediction_counts = []
        outputs.draft_counts, self.draft_counts = self.draft_counts, b""
        if self.pooled:
            outputs.pooled, self.pooled = self.pooled, []
        return outputs


class ClientOutputs:
    """The outboxes of all clients. The client with the lowest index receives the statistics."""

    def __init__(self, core_index: int) -> None:
        self._core_index = core_index
        self._outboxes: dict[int, Outbox] = {}

    def add_client(self, client_index: int) -> None:
        """Add an outbox for a client, unless it has one."""
        if client_index not in self._outboxes:
            self._outboxes[client_index] = Outbox()
            self._outboxes = dict(sorted(self._outboxes.items()))

    def remove_client(self, client_index: int) -> None:
        """Delete the outbox of a client and everything collected in it."""
        self._outboxes.pop(client_index, None)

    def __getitem__(self, client_index: int) -> Outbox:
        return self._outboxes[client_index]

    def record_event(self, request: Request, kind: EventKind, now: float) -> None:
        """Record an event of one request."""
        moment = self._outboxes[request.client_index].get_event_batch(kind, now)
        moment.request_indices.append(request.request_index)
        if kind is _SCHEDULED:
            moment.add_scheduled([request])

    def record_progress(self, rows: Sequence[tuple[ScheduledRow, int]], now: float) -> None:
        """Record how many tokens of requests are computed."""
        for row, num_computed in rows:
            if row.is_alive:
                outbox = self._outboxes[row.request.client_index]
                moment = outbox.get_event_batch(EventKind.PROGRESS, now)
                moment.request_indices.append(row.request.request_index)
                moment.num_cached_tokens.append(num_computed)
                outbox.has_progress = True

    def record_drafts(self, sampling: Batch, num_verified: Int64Array) -> None:
        """Record how many drafts each row of a step verified."""
        for rows in sampling.clients:
            counts = num_verified[rows.positions]
            drafted = counts.nonzero()[0]
            if len(drafted):
                pairs = int32_pairs(int32_view(rows.request_indices)[drafted], counts[drafted])
                self._outboxes[rows.client_index].draft_counts += pairs

    def record_events(self, requests: Sequence[Request], kind: EventKind, now: float) -> None:
        """Record the same event of several requests."""
        if len(self._outboxes) != 1 or not requests:
            for request in requests:
                self.record_event(request, kind, now)
            return
        (outbox,) = self._outboxes.values()
        moment = outbox.get_event_batch(kind, now)
        moment.request_indices += [request.request_index for request in requests]
        if kind is _SCHEDULED:
            moment.add_scheduled(requests)

    def finish_request(self, client_index: int, finished: FinishedRequest) -> None:
        """Record that a request finished. No reason is reported if the client itself aborted or moved the request."""
        outbox = self._outboxes[client_index]
        if finished.reason in _BY_CLIENT and not finished.message:
            outbox.aborted.append(finished.request_index)
        else:
            outbox.finished.append(finished)

    def make_step_outputs(
        self,
        sampling: Batch,
        token_ids: bytes,
        counts: Int64Array | None,
        now: float,
        make_stats: Callable[[], SchedulerStats] | None,
    ) -> dict[int, EngineCoreOutputs]:
        """Return the messages after a step: tokens, finished requests, and statistics if they are due.

        `token_ids` are int32. `counts` is the number of tokens per row; None means one token per row.
        """
        outputs = (
            self._split(sampling, token_ids, now)
            if counts is None
            else self._split_counted(sampling, token_ids, counts, now)
        )
        if len(outputs) < len(self._outboxes):
            outputs.update(self.take_finished_outputs(now))
        if make_stats is not None and self._outboxes:
            stats_client = next(iter(self._outboxes))
            if stats_client not in outputs:
                outputs[stats_client] = self._outboxes[stats_client].flush(self._core_index, now)
            outputs[stats_client].stats = make_stats()
        return outputs

    def _split(self, sampling: Batch, token_ids: bytes, now: float) -> dict[int, EngineCoreOutputs]:
        outputs = {}
        for client_index, positions, request_indices in sampling.clients:
            theirs = token_ids
            if len(request_indices) < len(token_ids):
                theirs = int32_view(token_ids)[positions].tobytes()
            outputs[client_index] = self._outboxes[client_index].flush(
                self._core_index, now, request_indices, theirs
            )
        return outputs

    def _split_counted(
        self, sampling: Batch, token_ids: bytes, counts: Int64Array, now: float
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = {}
        clients = sampling.clients
        if len(clients) == 1:
            [rows] = clients
            message = self._outboxes[rows.client_index].flush(
                self._core_index, now, rows.request_indices, token_ids
            )
            message.num_tokens = int32_bytes(counts)
            return {rows.client_index: message}
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        for rows in clients:
            is_included = np.zeros(len(counts), np.bool_)
            is_included[rows.positions] = True
            message = self._outboxes[rows.client_index].flush(
                self._core_index,
                now,
                rows.request_indices,
                int32_view(token_ids)[is_included[row_of_token]].tobytes(),
            )
            message.num_tokens = int32_bytes(counts[rows.positions])
            outputs[rows.client_index] = message
        return outputs

    def take_finished_outputs(
        self, now: float, *, has_stats: bool = False
    ) -> dict[int, EngineCoreOutputs]:
        """Return messages about finished requests and progress, which are sent without waiting for the next tokens.

        If `has_stats`, the client that receives the statistics gets a message even if none of its requests finished.
        """
        outputs: dict[int, EngineCoreOutputs] = {}
        for client_index, outbox in self._outboxes.items():
            is_urgent = outbox.finished or outbox.aborted or outbox.has_progress
            if is_urgent or (has_stats and not outputs):
                outputs[client_index] = outbox.flush(self._core_index, now)
        return outputs


def drop_logprobs(outputs: EngineCoreOutputs, num_bytes: int) -> list[int]:
    """Make outputs at least `num_bytes` smaller by failing the requests with the most log-probabilities.

    Return the failed requests that had not already finished.
    """
    sizes: Counter[int] = Counter()
    for message in (*outputs.logprobs, *outputs.prompt_logprobs):
        sizes[message.request_index] += (
            len(message.token_ids) + len(message.logprobs) + len(message.ranks)
        )
    failed: set[int] = set()
    for request_index, size in sizes.most_common():
        if num_bytes <= 0:
            break
        failed.add(request_index)
        num_bytes -= size - _FAILURE_BYTES
    ended = {done.request_index for done in outputs.finished}
    outputs.logprobs, outputs.prompt_logprobs = (
        [message for message in messages if message.request_index not in failed]
        for messages in (outputs.logprobs, outputs.prompt_logprobs)
    )
    outputs.finished = [done for done in outputs.finished if done.request_index not in failed]
    outputs.finished += [
        FinishedRequest(request_index, FinishReason.ERROR, message=_TOO_MANY_LOGPROBS)
        for request_index in failed
    ]
    return sorted(failed - ended)
