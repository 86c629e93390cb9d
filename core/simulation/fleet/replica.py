"""A simulated replica: the real scheduler, and a worker that takes as long as the model of step times says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

import numpy as np

from ....protocol.arrays import Int32Array
from ....protocol.block_hash import HashBlocks
from ....protocol.messages import EngineCoreOutputs, EngineCoreRequest
from ....protocol.worker_messages import SchedulerOutput
from ...replay.recorder import Setup
from ...scheduler.step_rows import StepRows
from ...state.slots import Float64Array
from ..draft_model import DraftModel
from ..step_time import StepClock, StepLoad, StepTimeModel, measure_load
from .fast_forward import FastForwardScheduler
from .remote_prefill import SimulatedTransfer
from .worker import SentStep, Worker

MIN_SKIPPED = 4
"""Fewer steps than this are not skipped, because the next one after them must be planned."""

MAX_SKIPPED = 256
"""Maximum steps whose end times are computed at once, because an arrival makes the others useless."""


class Receiver(Protocol):
    """The receiver of a replica's outputs."""

    def receive_outputs(self, index: int, message: EngineCoreOutputs, now: float) -> None:
        """Receive the outputs of a step of replica `index`."""

    def receive_steps(self, index: int, request_indices: Int32Array, times: Float64Array) -> None:
        """Receive a token for each of these requests at each of these times."""


class Replica:
    """One scheduler and one worker that executes steps in order.

    Steps in which every request decodes are skipped: their end times are computed together, and the scheduler catches
    up when a request arrives or finishes.

    Args:
        setup: The arguments of the scheduler.
        step_time: The model of step times.
        drafts: The model of drafts, or None for no drafts.
        index: The number of the replica.
        receiver: The receiver of outputs.
        hash_output: The hash function for blocks of generated tokens.
        phase: The share of the recorded ratios that `StepClock` passes over.
        can_skip: True if steps may be skipped. Nothing else depends on it.
        log_kv_events: True if the scheduler collects KV-cache events.
    """

    def __init__(
        self,
        setup: Setup,
        step_time: StepTimeModel,
        drafts: DraftModel | None,
        index: int,
        receiver: Receiver,
        hash_output: HashBlocks,
        *,
        phase: float,
        can_skip: bool,
        log_kv_events: bool = False,
    ) -> None:
        can_skip = can_skip and drafts is None and setup.config.scheduler_cls is None
        scheduler_class = FastForwardScheduler if can_skip else None
        connector = None
        if setup.kv_transfer is not None:
            connector = SimulatedTransfer()
        self.scheduler = setup.make_scheduler(
            hash_blocks=hash_output,
            scheduler_class=scheduler_class,
            log_kv_events=log_kv_events,
            kv_connector=connector,
        )
        self.scheduler.add_client(0)
        self.num_steps = 0
        self._index = index
        self._receiver = receiver
        self._load = StepLoad(0, 0, 0)
        self._clock = StepClock(step_time, phase)
        self._max_in_flight = setup.config.max_steps_in_flight
        self._in_flight: deque[SentStep] = deque()
        self._has_drafts = drafts is not None
        self._worker = Worker(drafts, is_async=setup.config.async_scheduling)
        self._rows = StepRows()
        self._busy_until = 0.0
        self._ends: list[float] = []
        """End times in seconds: of the steps in flight, then of the steps to be skipped."""
        self._num_skipped = 0
        """The number of steps that will be skipped if no request arrives before."""

    @property
    def next_event(self) -> float | None:
        """The time at which `finish_step` must be called; None if the replica is idle."""
        return self._ends[self._num_skipped] if self._ends else None

    def add_request(self, message: EngineCoreRequest, now: float) -> None:
        """Queue a request."""
        if self._num_skipped:
            ended = sum(end < now for end in islice(self._ends, self._num_skipped))
            self._skip(ended)
        self.scheduler.add_request(0, message, now)
        self._advance(now, ())

    def finish_step(self) -> None:
        """Apply the output of the oldest step in flight, at the time `next_event`."""
        if self._num_skipped:
            self._skip(self._num_skipped)
        now = self._ends.pop(0)
        sent = self._in_flight.popleft()
        result = self._worker.execute(sent)
        self._advance(now, self.scheduler.update_from_output(sent.step, result, now).values())

    def remove_request(self, request_index: int) -> None:
        """Remove the worker's state of an ended request."""
        self._worker.remove_request((0, request_index))

    @property
    def num_drafts(self) -> int:
        """The number of verified drafts."""
        return self._worker.num_drafts

    @property
    def num_accepted(self) -> int:
        """The number of drafts that were correct."""
        return self._worker.num_accepted

    def _advance(self, now: float, messages: Iterable[EngineCoreOutputs]) -> None:
        """Schedule and send steps until the limit of steps in flight, and deliver outputs."""
        scheduler = self.scheduler
        while len(self._in_flight) < self._max_in_flight and scheduler.has_requests():
            step = scheduler.schedule(now)
            if step is None:
                break
            counts = self._rows.read(step)
            self._load = measure_load(self._rows.slots, counts, scheduler.slots)
            self._busy_until = max(now, self._busy_until) + self._clock.take(self._load)
            self._in_flight.append(self._describe_step(step))
            self._ends.append(self._busy_until)
            self.num_steps += 1
        for message in (*messages, *scheduler.take_outputs(now).values()):
            self._receiver.receive_outputs(self._index, message, now)
        if isinstance(scheduler, FastForwardScheduler) and self._in_flight:
            count = min(scheduler.count_skippable(len(self._in_flight)), MAX_SKIPPED)
            if count >= MIN_SKIPPED and len(self._in_flight) == self._max_in_flight:
                seconds = self._clock.peek(self._load, count)
                seconds[0] += self._busy_until
                self._ends += np.cumsum(seconds).tolist()
                self._num_skipped = count

    def _skip(self, count: int) -> None:
        """Let the scheduler skip the first `count` steps, and plan the others again."""
        self._num_skipped = 0
        num_in_flight = len(self._in_flight)
        if count:
            assert isinstance(self.scheduler, FastForwardScheduler)
            self.scheduler.skip_steps(self._ends[:count], num_in_flight)
            self._load = self._clock.skip(self._load, count)
            self.num_steps += count
            indices = self.scheduler.slots.request_index[self._rows.slots]
            self._receiver.receive_steps(self._index, indices, np.array(self._ends[:count]))
        self._ends = self._ends[count : count + num_in_flight]
        self._busy_until = self._ends[-1]

    def _describe_step(self, step: SchedulerOutput) -> SentStep:
        expected = self.scheduler.get_step_in_flight(step)
        if not self._has_drafts:
            return SentStep(step, len(expected.sampling))
        slots = expected.sampling.slots.tolist()
        requests = [self.scheduler.slots.requests[slot] for slot in slots]
        return SentStep(
            step,
            len(slots),
            [request.key for request in requests if request is not None],
            slots,
            None if expected.num_drafts is None else expected.num_drafts.tolist(),
            # Workers propose nothing in a step with a partial prompt.
            may_propose=len(slots) == len(expected.batch),
        )
