"""Log the load of the replica at regular intervals."""

from __future__ import annotations

import logging

from ...protocol.arrays import int32_view
from ...protocol.messages import SchedulerStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Sums statistics, and logs them every `interval_s` seconds.

    After a replica has become idle, it logs one more line and then none.
    """

    def __init__(self, core_index: int, interval_s: float, now: float) -> None:
        self._core_index = core_index
        self._interval_s = interval_s
        self._since = now
        self._was_busy = False
        self._clear()

    def _clear(self) -> None:
        self._num_computed = self._num_prompt_tokens = self._num_tokens = 0
        self._num_looked_up = self._num_found = 0
        self._num_drafted = self._num_accepted = 0
        self._num_preemptions = 0

    def record(self, stats: SchedulerStats) -> None:
        """Add the counts of some steps."""
        self._num_computed += stats.num_scheduled_tokens
        self._num_prompt_tokens += stats.num_prompt_tokens
        self._num_tokens += int(int32_view(stats.step_tokens).sum())
        self._num_looked_up += stats.prefix_cache_queries
        self._num_found += stats.prefix_cache_hits
        self._num_preemptions += stats.num_preemptions
        if (drafts := stats.spec_decoding) is not None:
            self._num_drafted += drafts.num_draft_tokens
            self._num_accepted += drafts.num_accepted_tokens

    def write_if_due(
        self, now: float, num_running: int, num_waiting: int, kv_cache_usage: float
    ) -> None:
        """Log a line if the interval has passed. The gauges are the current values."""
        seconds = now - self._since
        if seconds < self._interval_s:
            return
        is_busy = bool(self._num_tokens or num_running or num_waiting)
        if is_busy or self._was_busy:
            num_generated = self._num_tokens - self._num_prompt_tokens
            # Prompt tokens count at the end of a prompt; computed tokens show the progress of a long one.
            parts = [
                f"{self._num_computed / seconds:.1f} computed tokens/s",
                f"{self._num_prompt_tokens / seconds:.1f} prompt tokens/s",
                f"{num_generated / seconds:.1f} generated tokens/s",
                f"{num_running} running",
                f"{num_waiting} waiting",
                f"KV cache {kv_cache_usage:.1%} used",
            ]
            if self._num_looked_up:
                parts.append(f"prefix cache hits {self._num_found / self._num_looked_up:.1%}")
            if self._num_drafted:
                parts.append(f"drafts accepted {self._num_accepted / self._num_drafted:.1%}")
            if self._num_preemptions:
                parts.append(f"{self._num_preemptions} preemptions")
            logger.info("replica %d: %s", self._core_index, ", ".join(parts))
        self._was_busy = is_busy
        self._since = now
        self._clear()
