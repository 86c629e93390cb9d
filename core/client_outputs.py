"""What the clients are still to be told of their requests."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from ..protocol.arrays import Int64Array, int32_bytes, int32_view
from ..protocol.messages import (
    EngineCoreOutputs,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvents,
    SchedulerStats,
    TokenLogprobs,
)
from .batch import Batch
from .request import Request

_SCHEDULED: Final = EventKind.SCHEDULED
_ABORT: Final = FinishReason.ABORT

_TOO_MANY_LOGPROBS: Final = (
    "the log-probabilities of this request are more than the engine's processes "
    "can tell one another"
)
_FAILURE_BYTES: Final = 256
"""More than that message takes."""


class _Moment(msgspec.Struct):
    """What happened to some requests at one time."""

    kind: EventKind
    timestamp: float
    request_indices: list[int]
    num_cached_tokens: list[int]

    def to_message(self) -> RequestEvents:
        return RequestEvents(
            self.kind,
            self.timestamp,
            array("i", self.request_indices).tobytes(),
            array("i", self.num_cached_tokens).tobytes(),
        )


class Outbox:
    """The rare events of one client between two messages to it."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []
        self.aborted: list[int] = []
        """Requests that the client has aborted: it is told that they have ended, without a reason."""
        self.moments: list[_Moment] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._sequence = 0

    def moment(self, kind: EventKind, now: float) -> _Moment:
        """The record of this kind and time, to which requests are added."""
        moment = self.moments[-1] if self.moments else None
        if moment is None or moment.kind is not kind or moment.timestamp != now:
            moment = _Moment(kind, now, [], [])
            self.moments.append(moment)
        return moment

    def empty(
        self, core_index: int, now: float, request_indices: bytes = b"", token_ids: bytes = b""
    ) -> EngineCoreOutputs:
        """The next message: the given tokens and everything collected."""
        outputs = EngineCoreOutputs(core_index, self._sequence, now, request_indices, token_ids)
        self._sequence += 1
        if self.moments:
            outputs.events = [moment.to_message() for moment in self.moments]
            self.moments = []
        if self.finished or self.aborted:
            ended = [end.request_index for end in self.finished] + self.aborted
            outputs.finished_set = array("i", ended).tobytes()
            outputs.finished, self.finished, self.aborted = self.finished, [], []
        if self.logprobs:
            outputs.logprobs, self.logprobs = self.logprobs, []
        if self.prompt_logprobs:
            outputs.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        return outputs


class ClientOutputs:
    """One outbox a client. The client with the lowest index gets the statistics."""

    def __init__(self, core_index: int) -> None:
        self._core_index = core_index
        self._outboxes: dict[int, Outbox] = {}

    def open(self, client_index: int) -> None:
        if client_index not in self._outboxes:
            self._outboxes[client_index] = Outbox()
            self._outboxes = dict(sorted(self._outboxes.items()))

    def close(self, client_index: int) -> None:
        self._outboxes.pop(client_index, None)

    def __getitem__(self, client_index: int) -> Outbox:
        return self._outboxes[client_index]

    def event(self, request: Request, kind: EventKind, now: float) -> None:
        """Something happened to a request."""
        moment = self._outboxes[request.client_index].moment(kind, now)
        moment.request_indices.append(request.request_index)
        if kind is _SCHEDULED:
            moment.num_cached_tokens.append(request.num_cached_tokens)

    def events(self, requests: Sequence[Request], kind: EventKind, now: float) -> None:
        """The same happened to several requests."""
        if len(self._outboxes) != 1 or not requests:
            for request in requests:
                self.event(request, kind, now)
            return
        (outbox,) = self._outboxes.values()
        moment = outbox.moment(kind, now)
        moment.request_indices += [request.request_index for request in requests]
        if kind is _SCHEDULED:
            moment.num_cached_tokens += [request.num_cached_tokens for request in requests]

    def finish(self, client_index: int, finished: FinishedRequest) -> None:
        """A request ended. Of one that the client has aborted it is not told why."""
        outbox = self._outboxes[client_index]
        if finished.reason is _ABORT and not finished.message:
            outbox.aborted.append(finished.request_index)
        else:
            outbox.finished.append(finished)

    def take(
        self,
        sampling: Batch,
        token_ids: bytes,
        counts: Int64Array | None,
        now: float,
        make_stats: Callable[[], SchedulerStats] | None,
    ) -> dict[int, EngineCoreOutputs]:
        """The messages after a step: its int32 tokens, what is urgent, and the statistics if these are due.

        `counts` are the tokens of each row, None for one each.
        """
        outputs = (
            self._split(sampling, token_ids, now)
            if counts is None
            else self._split_counted(sampling, token_ids, counts, now)
        )
        if len(outputs) < len(self._outboxes):
            outputs.update(self.take_urgent(now))
        if make_stats is not None and self._outboxes:
            listener = next(iter(self._outboxes))
            if listener not in outputs:
                outputs[listener] = self._outboxes[listener].empty(self._core_index, now)
            outputs[listener].stats = make_stats()
        return outputs

    def _split(self, sampling: Batch, token_ids: bytes, now: float) -> dict[int, EngineCoreOutputs]:
        outputs = {}
        for client_index, positions, request_indices in sampling.clients:
            theirs = token_ids
            if len(request_indices) < len(token_ids):
                theirs = int32_view(token_ids)[positions].tobytes()
            outputs[client_index] = self._outboxes[client_index].empty(
                self._core_index, now, request_indices, theirs
            )
        return outputs

    def _split_counted(
        self, sampling: Batch, token_ids: bytes, counts: Int64Array, now: float
    ) -> dict[int, EngineCoreOutputs]:
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        outputs = {}
        for rows in sampling.clients:
            is_included = np.zeros(len(counts), np.bool_)
            is_included[rows.positions] = True
            message = self._outboxes[rows.client_index].empty(
                self._core_index,
                now,
                rows.request_indices,
                int32_view(token_ids)[is_included[row_of_token]].tobytes(),
            )
            message.num_tokens = int32_bytes(counts[rows.positions])
            outputs[rows.client_index] = message
        return outputs

    def take_urgent(self, now: float) -> dict[int, EngineCoreOutputs]:
        """Messages of requests that ended, which cannot wait for a step with tokens."""
        outputs = {}
        for client_index, outbox in self._outboxes.items():
            if outbox.finished or outbox.aborted:
                outputs[client_index] = outbox.empty(self._core_index, now)
        return outputs


def drop_logprobs(outputs: EngineCoreOutputs, num_bytes: int) -> list[int]:
    """Make outputs smaller by so many bytes, if their log-probabilities are that large.

    The requests with most of them fail. Returns those that had not ended.
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
