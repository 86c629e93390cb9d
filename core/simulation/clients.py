"""Records when the clients of a simulation receive their tokens, and computes their latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.messages import EngineCoreOutputs, FinishReason
from ..state.slots import Float64Array
from .frontend_times import FrontendTimes
from .trace import TraceRequest


class Latencies(NamedTuple):
    """Latencies in seconds, as clients see them.

    `first_token` and `whole` are from the arrival at a frontend to the first and the last token. `inter_token` is
    between events with tokens.
    """

    first_token: Float64Array
    inter_token: Float64Array
    whole: Float64Array


class Clients:
    """Records when each client got its tokens.

    Args:
        trace: The requests.
        frontend: The times in the frontend. All tokens of a step are delivered together.
    """

    def __init__(self, trace: Sequence[TraceRequest], frontend: FrontendTimes) -> None:
        self._draw_delivery = frontend.draw_delivery()
        self._arrival = np.array([request.arrival for request in trace])
        self._last = np.full(len(trace), np.nan)
        self._gaps: list[Float64Array] = []
        self.first = np.full(len(trace), np.nan)
        self.ends: list[tuple[int, FinishReason]] = []
        self.num_tokens = self.num_preemptions = self.cached_tokens = 0

    def receive_outputs(self, message: EngineCoreOutputs, now: float) -> None:
        """Record the tokens and ended requests of a message."""
        rows = int32_view(message.request_indices)
        if len(rows):
            last = self._last[rows]
            # An event never overtakes the one before it.
            received = np.fmax(now + self._draw_delivery(1), last)
            is_first = np.isnan(last)
            self.first[rows[is_first]] = received[is_first]
            self._gaps.append((received - last)[~is_first])
            self._last[rows] = received
            self.num_tokens += len(message.token_ids) // 4
        self.ends += [(end.request_index, end.reason) for end in message.finished]
        if message.stats is not None:
            self.num_preemptions += message.stats.num_preemptions
            self.cached_tokens += message.stats.prefix_cache_hits

    def receive_steps(self, rows: Int32Array, times: Float64Array) -> None:
        """Record a token for each of these requests at each of these times."""
        received = np.maximum.accumulate(times + self._draw_delivery(len(times)))
        last = self._last[rows]
        received = np.maximum(received, last.max())
        self._gaps += [received[0] - last, np.repeat(np.diff(received), len(rows))]
        self._last[rows] = received[-1]
        self.num_tokens += len(rows) * len(times)

    def latencies(self) -> Latencies:
        """Return the latencies so far."""
        finished = [index for index, reason in self.ends if reason is FinishReason.LENGTH]
        started = ~np.isnan(self.first)
        return Latencies(
            (self.first - self._arrival)[started],
            np.concatenate(self._gaps) if self._gaps else np.zeros(0),
            (self._last - self._arrival)[finished],
        )

    def count(self, reason: FinishReason) -> int:
        """Return how many requests ended for this reason."""
        return sum(ended is reason for _, ended in self.ends)
