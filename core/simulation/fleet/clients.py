"""Records when the clients of a simulation receive their tokens, and computes their latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32Array, int32_view
from ....protocol.messages import EngineCoreOutputs, FinishReason
from ...state.slots import Float64Array
from ..frontend_times import FrontendTimes
from ..trace import TraceRequest


class Latencies(NamedTuple):
    """Latencies in seconds, as clients see them.

    `first_token` and `whole` are from the arrival at a frontend to the first and the last token. `inter_token` is
    between events with tokens.
    """

    first_token: Float64Array
    inter_token: Float64Array
    whole: Float64Array


class ClientRecords(NamedTuple):
    """The records of the clients of some replicas.

    `first` and `last` are the times of each request's first and last token, NaN without one; `gaps` are the times
    between tokens, in seconds, and `ends` the ended requests.
    """

    first: Float64Array
    last: Float64Array
    gaps: Float64Array
    ends: list[tuple[int, FinishReason]]
    num_tokens: int
    num_preemptions: int
    cached_tokens: int
    last_event: float
    num_steps: int
    num_drafts: int
    num_accepted: int


class Clients:
    """Records when each client got its tokens.

    Args:
        trace: The requests.
        frontend: The times in the frontend. All tokens of a step are delivered together.
        num_replicas: The number of replicas. Each has delivery times of its own.
    """

    def __init__(
        self, trace: Sequence[TraceRequest], frontend: FrontendTimes, num_replicas: int
    ) -> None:
        self._deliveries = [frontend.delivery_times(index) for index in range(num_replicas)]
        self._last = np.full(len(trace), np.nan)
        self._first = np.full(len(trace), np.nan)
        self._gaps: list[Float64Array] = []
        self._ends: list[tuple[int, FinishReason]] = []
        self._num_tokens = self._num_preemptions = self._cached_tokens = 0

    def receive_outputs(self, index: int, message: EngineCoreOutputs, now: float) -> None:
        """Record the tokens and ended requests of a message from a replica."""
        rows = int32_view(message.request_indices)
        if len(rows):
            last = self._last[rows]
            # An event never overtakes the one before it.
            received = np.fmax(now + self._deliveries[index].take(1), last)
            is_first = np.isnan(last)
            if is_first.any():
                self._first[rows[is_first]] = received[is_first]
                self._gaps.append((received - last)[~is_first])
            else:
                self._gaps.append(received - last)
            self._last[rows] = received
            self._num_tokens += len(message.token_ids) // 4
        if message.finished:
            self._ends += [(end.request_index, end.reason) for end in message.finished]
        if message.stats is not None:
            self._num_preemptions += message.stats.num_preemptions
            self._cached_tokens += message.stats.prefix_cache_hits

    def receive_steps(self, index: int, rows: Int32Array, times: Float64Array) -> None:
        """Record a token for each of these requests of a replica at each of these times."""
        received = np.maximum.accumulate(times + self._deliveries[index].take(len(times)))
        last = self._last[rows]
        received = np.maximum(received, last.max())
        self._gaps += [received[0] - last, np.repeat(np.diff(received), len(rows))]
        self._last[rows] = received[-1]
        self._num_tokens += len(rows) * len(times)

    def records(
        self, last_event: float, num_steps: int, num_drafts: int, num_accepted: int
    ) -> ClientRecords:
        """Return the records, with the time of the last event and the counts of the replicas."""
        return ClientRecords(
            self._first,
            self._last,
            np.concatenate(self._gaps) if self._gaps else np.zeros(0),
            self._ends,
            self._num_tokens,
            self._num_preemptions,
            self._cached_tokens,
            last_event,
            num_steps,
            num_drafts,
            num_accepted,
        )


def measure_latencies(trace: Sequence[TraceRequest], records: Sequence[ClientRecords]) -> Latencies:
    """Return the latencies of the requests of a trace, from the records of all replicas."""
    arrival = np.array([request.arrival for request in trace])
    first = np.fmax.reduce([each.first for each in records])
    last = np.fmax.reduce([each.last for each in records])
    ends = (end for each in records for end in each.ends)
    finished = sorted(index for index, reason in ends if reason is FinishReason.LENGTH)
    return Latencies(
        (first - arrival)[~np.isnan(first)],
        np.concatenate([each.gaps for each in records]),
        (last - arrival)[finished],
    )
