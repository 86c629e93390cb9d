"""A scheduler that skips steps in which every request decodes, because nothing is decided there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....protocol.arrays import Int32Array
from ...scheduler.scheduler import Scheduler
from ...state.batch import StepInFlight


class FastForwardScheduler(Scheduler):
    """A scheduler whose repeated steps can be skipped.

    A skipped step replaces two calls: `update_from_output` for the oldest step in flight, which sampled token 0 for
    every row, and `schedule`, which repeats it. The state afterwards equals that after the calls, apart from
    statistics and the numbers of the steps in flight, which stay.
    """

    def count_skippable(self, num_in_flight: int) -> int:
        """Return how many of the next steps can be skipped, if there are `num_in_flight` steps in flight.

        No skipped step finishes a request or evicts a cached block.
        """
        num_running, num_waiting = self.get_request_counts()
        may_admit = num_waiting and (self.slots.num_free or self._config.priority_preemption)
        if self._fast_path is None or may_admit or not num_running:
            return 0
        steps = self._results.get_last_steps(num_in_flight)
        batch = steps[-1].batch
        if (
            len(batch) != num_running
            or batch.num_vacated != self.slots.num_vacated
            or not all(_is_plain(step) and step.batch is batch for step in steps)
        ):
            return 0
        slots = batch.slots
        computed = self.slots.num_computed_tokens[slots]
        num_left = int((self.slots.max_computed_tokens[slots] - computed).min())
        block_size = self.kv_cache_manager.block_size
        room = self.kv_cache_manager.tables.capacity[slots] - computed
        # After n steps a row with room for r tokens has taken ceil((n - r) / block_size) blocks.
        num_blank = self.kv_cache_manager.pool.num_blank
        while num_left > 0 and np.maximum(-((room - num_left) // block_size), 0).sum() > num_blank:
            num_left //= 2
        return max(num_left, 0)

    def skip_steps(self, ends: Sequence[float], num_in_flight: int) -> None:
        """Skip the next steps, which end at these times, if there are `num_in_flight` steps in flight."""
        assert self._fast_path is not None
        count = len(ends)
        oldest = self._results.get_last_steps(num_in_flight)[0]
        for end in ends:
            # The others were scheduled later, but no step begins before the previous one ends.
            self._partial_prefills.pace.record_step(oldest, end)
        slots = oldest.batch.slots
        tables, block_size = self.kv_cache_manager.tables, self.kv_cache_manager.block_size
        capacity = tables.capacity[slots]
        room = (capacity - self.slots.num_computed_tokens[slots]).tolist()
        num_held = (capacity // block_size).tolist()
        rows_of_step: dict[int, list[int]] = {}
        for row, num_tokens in enumerate(room):
            for step in range(num_tokens, count, block_size):
                rows_of_step.setdefault(step, []).append(row)
        slot_list = slots.tolist()
        for _, rows in sorted(rows_of_step.items()):
            tables.grow_by_one([slot_list[row] for row in rows], [num_held[row] for row in rows])
            for row in rows:
                num_held[row] += 1
        self.slots.num_computed_tokens[slots] += count
        self.slots.num_expected_tokens[slots] += count
        tokens: Int32Array = np.zeros(count * len(slots), np.int32)
        self.slots.append_outputs(slots, np.full(len(slots), count), tokens)
        self.lifecycle.stats.num_steps += count
        self.lifecycle.stats.num_scheduled_tokens += count * len(slots)
        self._fast_path.stop()


def _is_plain(step: StepInFlight) -> bool:
    return (
        step.sampling is step.batch
        and not step.has_prefill
        and not step.prefilled
        and not step.constrained
    )
