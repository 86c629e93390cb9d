"""How much work a core holds, and when that is too much."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from ..protocol.config import SchedulerConfig
from ..protocol.errors import EngineError
from .routing import CachedPrefixes

MAX_RETRY_AFTER_S: Final = 3600


class Overloaded(EngineError):
    """The queue is full. After `retry_after_s` it should have room, at the present rate."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class CoreLoad:
    """Counts the sequences and prompt tokens that this frontend has at one core.

    `num_others` is how many sequences the other frontends have there, as the core last told.
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
        """Sequences of all frontends."""
        return self.num_inflight + self.num_others

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Raise Overloaded if new sequences with `num_tokens` prompt tokens do not fit in the queue."""
        limits = self._limits
        queued = self.total + num_sequences - limits.max_num_seqs
        if self.num_queued:
            queued = max(queued, self.num_queued + num_sequences)
        if 0 < limits.max_num_queued_reqs < queued:
            raise Overloaded(
                f"the queue is full: {queued} sequences would wait, "
                f"the limit is {limits.max_num_queued_reqs} (--max-num-queued-reqs)",
                self._retry_after_s(queued),
            )
        waiting = self.num_unscheduled_tokens
        if waiting and 0 < limits.max_num_queued_tokens < waiting + num_tokens:
            raise Overloaded(
                f"the queue is full: {waiting + num_tokens} prompt tokens would wait, "
                f"the limit is {limits.max_num_queued_tokens} (--max-num-queued-tokens)",
                self._retry_after_s(max(queued, num_sequences)),
            )

    def submitted(self, num_prompt_tokens: int, block_keys: Sequence[int]) -> None:
        if not self.num_inflight:
            # Time in which there was nothing to do says nothing about the pace.
            self._last_finish_time = time.monotonic()
        self.num_inflight += 1
        self.prefixes.expect(block_keys)
        self.num_unscheduled_tokens += num_prompt_tokens

    def queued(self) -> None:
        self.num_queued += 1

    def left_queue(self, num_prompt_tokens: int, *, was_queued: bool) -> None:
        self.num_queued -= was_queued
        self.num_unscheduled_tokens -= num_prompt_tokens

    def moved_away(self, block_keys: Sequence[int]) -> None:
        """A sequence that has left the queue goes on elsewhere."""
        self.num_inflight -= 1
        self.prefixes.expect_no_more(block_keys)

    def finished(self, block_keys: Sequence[int]) -> None:
        self.moved_away(block_keys)
        now = time.monotonic()
        self._intervals.append(now - self._last_finish_time)
        self._last_finish_time = now

    def _retry_after_s(self, num_sequences: int) -> int:
        """Seconds until that many more sequences will have finished, at least 1."""
        if not self._intervals:
            return 1
        seconds = num_sequences * sum(self._intervals) / len(self._intervals)
        return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
