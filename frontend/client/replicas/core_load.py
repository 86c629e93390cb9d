"""The load of a core as seen by a frontend, the limits of the core's queue, and the estimate for `Retry-After`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from ....protocol.config import SchedulerConfig
from ....protocol.errors import EngineError
from ....protocol.routing.cached_prefixes import CachedPrefixes

MAX_RETRY_AFTER_S: Final = 3600
"""Maximum value of `Retry-After`, in seconds."""


class Overloaded(EngineError):
    """Raised if the queue is full. At the current rate, a request fits after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class CoreLoad:
    """Counts this frontend's sequences and prompt tokens at one core.

    `num_others` is the number of other frontends' sequences, from the core's last report.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._limits = limits
        self.num_inflight = 0
        self.num_others = 0
        self.prefixes = CachedPrefixes()
        self.num_queued = 0
        self.num_unscheduled_tokens = 0
        self._intervals: deque[float] = deque(maxlen=64)
        self._last_finish_time = 0.0

    @property
    def total(self) -> int:
        """The number of sequences of all frontends."""
        return self.num_inflight + self.num_others

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Raise Overloaded if `num_sequences` new sequences with `num_tokens` prompt tokens do not fit in the queue."""
        limits = self._limits
        queued = self.total + num_sequences - limits.max_num_seqs
        if self.num_queued:
            queued = max(queued, self.num_queued + num_sequences)
        if 0 < limits.max_num_queued_reqs < queued:
            raise Overloaded(
                f"the queue is full: {queued} sequences would wait, "
                f"but the limit is {limits.max_num_queued_reqs} (--max-num-queued-reqs)",
                self._retry_after_s(queued),
            )
        waiting = self.num_unscheduled_tokens
        if waiting and 0 < limits.max_num_queued_tokens < waiting + num_tokens:
            raise Overloaded(
                f"the queue is full: {waiting + num_tokens} prompt tokens would wait, "
                f"but the limit is {limits.max_num_queued_tokens} (--max-num-queued-tokens)",
                self._retry_after_s(max(queued, num_sequences)),
            )

    def record_submitted(self, num_prompt_tokens: int, routing_keys: Sequence[int]) -> None:
        """Record that a sequence was sent to the core."""
        if not self.num_inflight:
            # Idle time must not count when the rate of finished sequences is computed.
            self._last_finish_time = time.monotonic()
        self.num_inflight += 1
        self.prefixes.add_expected(routing_keys)
        self.num_unscheduled_tokens += num_prompt_tokens

    def record_queued(self) -> None:
        """Record that the core has queued a sequence."""
        self.num_queued += 1

    def record_left_queue(self, num_prompt_tokens: int, *, was_queued: bool) -> None:
        """Record that a sequence left the queue: it was scheduled for the first time, finished, or is moving."""
        self.num_queued -= was_queued
        self.num_unscheduled_tokens -= num_prompt_tokens

    def record_moved(self, routing_keys: Sequence[int]) -> None:
        """Record that a sequence continues at another core. It must have left the queue."""
        self.num_inflight -= 1
        self.prefixes.remove_expected(routing_keys)

    def record_finished(self, routing_keys: Sequence[int]) -> None:
        """Record that a sequence has finished. It must have left the queue."""
        self.record_moved(routing_keys)
        now = time.monotonic()
        self._intervals.append(now - self._last_finish_time)
        self._last_finish_time = now

    def _retry_after_s(self, num_sequences: int) -> int:
        """Return the estimated seconds until `num_sequences` sequences will have finished, at least 1."""
        if not self._intervals:
            return 1
        seconds = num_sequences * sum(self._intervals) / len(self._intervals)
        return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
