"""Repeat the last step cheaply while all running requests decode and none starts or finishes."""

from __future__ import annotations

import numpy as np

from ...protocol.arrays import Int64Array
from ...protocol.config import SchedulerConfig, SchedulingPolicy
from ...protocol.worker_messages import SchedulerOutput
from ..state.batch import Batch, StepInFlight
from .features.encoder_inputs import EncoderInputs
from .features.speculative import Drafts
from .lifecycle import RequestLifecycle
from .step_results import StepResults


class DecodeFastPath:
    """Repeats the previous step for as long as all running requests decode and none starts or finishes.

    A repeated step only counts the new tokens and gives blocks to the slots that need one, which are the same slots
    every `block_size` steps. Its decisions equal those of full planning. It pays off because the core sleeps between
    steps, so its code and data are no longer in the CPU caches: the less memory a step touches, the faster it is.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: RequestLifecycle,
        *,
        encoders: EncoderInputs,
        drafts: Drafts | None,
        results: StepResults,
    ) -> None:
        self._lifecycle = lifecycle
        self._queue = lifecycle.queue
        self._slots = lifecycle.running.slots
        self._tables = lifecycle.manager.tables
        self._pool = lifecycle.manager.pool
        self._block_size = lifecycle.manager.block_size
        self._encoders = encoders
        self._drafts = drafts
        self._results = results
        self._may_displace = (
            config.policy == SchedulingPolicy.PRIORITY and config.priority_preemption
        )
        """True if the queue's policy lets a waiting request preempt a running one."""
        self._batch = Batch(np.zeros(0, np.intp), self._slots)
        self._num_common_blocks = 0
        self._num_left = 0
        self._num_repeated = 0
        self._room: Int64Array = np.zeros(0, np.int64)
        self._num_held: Int64Array = np.zeros(0, np.int64)
        self._growing: list[tuple[list[int], list[int]]] = []
        """For each step number modulo `block_size`: the slots that need a block then, and how many they hold."""

    @staticmethod
    def is_possible(config: SchedulerConfig, lifecycle: RequestLifecycle) -> bool:
        """Return whether the configuration allows repeated steps.

        It does not if blocks are copied or loaded, drafts need blocks, decoding requests are split into micro-batches
        or compute blocks of tokens, or preemption is injected.
        """
        speculative, manager = config.speculative, lifecycle.manager
        return (
            manager.tables.is_simple
            and manager.cpu_offload is None
            and lifecycle.transfers is None
            and (speculative is None or speculative.num_lookahead_tokens == 0)
            and config.num_micro_batches == 1
            and config.diffusion is None
            and not config.inject_preemption
        )

    def start(self, output: SchedulerOutput, in_flight: StepInFlight) -> None:
        """Record a planned step. If all of its requests decode in the next step, that may repeat it until `stop`."""
        batch, running = in_flight.batch, self._lifecycle.running
        if (
            in_flight.sampling is not batch
            or in_flight.num_drafts is not None
            or in_flight.constrained
            or running.prefilling
            or running.awaiting_masks
            # A prompt may have taken the tokens of a decoding request.
            or (output.chunks and len(batch) < len(running))
            or not len(batch)
            or self._may_admit()
            or self._lifecycle.poison_isolation.suspects
        ):
            return
        slots = batch.slots
        computed = self._slots.num_computed_tokens[slots]
        capacity = self._tables.capacity[slots]
        room = capacity - computed
        if room.max() >= self._block_size:
            return
        self._batch = batch
        self._num_common_blocks = output.num_common_blocks
        self._num_left = int((self._slots.max_computed_tokens[slots] - computed).min())
        self._num_repeated = 0
        self._room = room
        self._num_held = capacity // self._block_size
        self._growing = []

    def stop(self) -> None:
        """Stop repeating: the next step is planned."""
        self._num_left = 0

    def repeat_step(self, step: int, now: float) -> SchedulerOutput | None:
        """Return the same step again as number `step`, or None if the next one must be planned."""
        batch = self._batch
        if (
            not self._num_left
            or batch.num_vacated != self._slots.num_vacated
            or self._may_admit()
            or (self._drafts is not None and self._needs_planning(self._drafts, batch))
            or self._encoders.are_in_use
            or self._lifecycle.deadlines.is_any_past(now)
        ):
            return None
        phase = self._num_repeated % self._block_size
        if phase == len(self._growing):
            rows = self._room == phase
            self._growing.append((batch.slots[rows].tolist(), self._num_held[rows].tolist()))
        growing, num_held = self._growing[phase]
        if len(growing) > self._pool.num_free:
            return None
        self._pool.lifetimes.now = now
        updates = b""
        if growing:
            updates = self._tables.grow_by_one(growing, num_held)
            self._growing[phase] = growing, [count + 1 for count in num_held]
        self._num_left -= 1
        self._num_repeated += 1
        self._slots.advance_deferred(batch.slots)
        self._results.add_step(StepInFlight(step, batch, batch, [], [], now, False, 0, [], None))
        stats = self._lifecycle.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += len(batch.slots)
        return SchedulerOutput(
            step, block_updates=updates, num_common_blocks=self._num_common_blocks
        )

    def _needs_planning(self, drafts: Drafts, batch: Batch) -> bool:
        """Return whether the next step must be planned because drafts or their limits may change."""
        drafts.limits.decide(batch.slots)
        return drafts.has_drafts or drafts.limits.has_unsent

    def _may_admit(self) -> bool:
        """Return whether a waiting request may get a free slot or preempt a running one."""
        return len(self._queue) > 0 and (self._slots.num_free > 0 or self._may_displace)
