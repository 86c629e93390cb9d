"""Runs a trace on simulated replicas: the real scheduler in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...protocol.arrays import int32_bytes, int32_list, int32_view
from ...protocol.errors import EngineError
from ...protocol.messages import EngineCoreOutputs, FinishReason
from ...protocol.worker_messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from ..replay.recorder import Setup
from ..scheduler.step_rows import StepRows
from ..state.request import RequestKey
from ..state.slots import Float64Array
from .draft_model import DraftModel
from .step_time import StepTimeModel, measure_load
from .trace import TraceRequest

PERCENTILES = (50, 90, 99)


class Latencies(NamedTuple):
    """Latencies in seconds.

    `first_token` and `whole` are from the arrival to the first and the last token. `inter_token` is between messages
    with tokens.
    """

    first_token: Float64Array
    inter_token: Float64Array
    whole: Float64Array


class SimulationResult(NamedTuple):
    """Totals of a simulation.

    `seconds` is from the first arrival to the last token. Every request is finished, refused or expired.
    """

    latencies: Latencies
    seconds: float
    num_finished: int
    num_refused: int
    num_expired: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int

    def summary(self) -> dict[str, float]:
        """Return the results by name: rates per second, latencies in milliseconds."""
        seconds = self.seconds or 1.0
        summary: dict[str, float] = {
            "finished": self.num_finished,
            "refused": self.num_refused,
            "expired": self.num_expired,
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(self.num_finished / seconds, 3),
            "prompt_tokens_per_s": round(self.prompt_tokens / seconds, 1),
            "output_tokens_per_s": round(self.output_tokens / seconds, 1),
            "preemptions": self.num_preemptions,
            "cached_tokens": self.cached_tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }
        names = ("ttft", "itl", "e2e")
        for name, values in zip(names, self.latencies, strict=True):
            for percentile in PERCENTILES:
                value = float(np.percentile(values, percentile)) if len(values) else 0.0
                summary[f"{name}_p{percentile}_ms"] = round(1e3 * value, 3)
        return summary


class _SentStep(NamedTuple):
    """A step in flight.

    `keys` and `slots` are those of the rows that sample, and `num_drafts` the drafts scheduled for each, or None.
    """

    step: SchedulerOutput
    keys: list[RequestKey]
    slots: list[int]
    num_drafts: list[int] | None
    may_propose: bool


class _Worker:
    """Return as many sampled tokens as a worker with drafts would.

    Random choices depend on the request alone, so that policies are compared under equal conditions.
    """

    def __init__(self, drafts: DraftModel | None, *, is_async: bool) -> None:
        self._model = drafts
        self._is_async = is_async
        self._proposed: dict[RequestKey, int] = {}
        self._chances: dict[RequestKey, random.Random] = {}
        self.num_drafts = self.num_accepted = 0

    def execute(self, sent: _SentStep) -> ModelRunnerOutput:
        """Return the output of a step. Steps must be executed in order."""
        number, count = sent.step.step, len(sent.keys)
        if self._model is None:
            return ModelRunnerOutput(number, bytes(4 * count))
        num_verified = sent.num_drafts or [0] * count
        if self._is_async:
            # Asynchronous steps verify only drafts that were found before the step ran.
            found = [self._proposed.get(key, 0) for key in sent.keys]
            num_verified = list(map(min, num_verified, found))
        accepted = [
            self._model.accept(self._chance(key), verified)
            for key, verified in zip(sent.keys, num_verified, strict=True)
        ]
        self.num_drafts += sum(num_verified)
        self.num_accepted += sum(accepted)
        num_sampled = [each + 1 for each in accepted]
        output = ModelRunnerOutput(number, bytes(4 * sum(num_sampled)))
        if sent.num_drafts is not None:
            output.num_sampled = int32_bytes(num_sampled)
            if self._is_async:
                output.num_verified = int32_bytes(num_verified)
        output.drafts = self._propose(sent)
        return output

    def remove_request(self, key: RequestKey) -> None:
        """Remove the state of an ended request."""
        self._proposed.pop(key, None)
        self._chances.pop(key, None)

    def _propose(self, sent: _SentStep) -> DraftTokenIds | None:
        assert self._model is not None
        counts = []
        for key in sent.keys:
            count = 0
            if sent.may_propose:
                count = self._model.propose(self._chance(key), self._proposed.get(key, 0) > 0)
            self._proposed[key] = count
            counts.append(count)
        if not any(counts):
            return None
        return DraftTokenIds(
            sent.step.step, int32_bytes(sent.slots), int32_bytes(counts), bytes(4 * sum(counts))
        )

    def _chance(self, key: RequestKey) -> random.Random:
        chance = self._chances.get(key)
        if chance is None:
            chance = self._chances[key] = random.Random(key[1])
        return chance


class _Replica:
    """One scheduler and one worker that executes steps in order."""

    def __init__(self, setup: Setup, step_time: StepTimeModel, drafts: DraftModel | None) -> None:
        self.scheduler = setup.make_scheduler()
        self.scheduler.add_client(0)
        self.num_unfinished = 0
        self._step_time = step_time
        self._max_in_flight = setup.config.max_steps_in_flight
        self._in_flight: deque[_SentStep] = deque()
        self.worker = _Worker(drafts, is_async=setup.config.async_scheduling)
        self._busy_until = 0.0
        self._rows = StepRows()

    def schedule(self, now: float) -> list[float]:
        """Schedule and send steps until the limit of steps in flight. Return the times at which they end."""
        ends = []
        while len(self._in_flight) < self._max_in_flight and self.scheduler.has_requests():
            step = self.scheduler.schedule(now)
            if step is None:
                break
            counts = self._rows.read(step)
            load = measure_load(self._rows.slots, counts, self.scheduler.slots)
            seconds = self._step_time.seconds(load) if load.tokens else 0.0
            self._busy_until = max(now, self._busy_until) + seconds
            self._in_flight.append(self._describe_step(step))
            ends.append(self._busy_until)
        return ends

    def finish_step(self, now: float) -> Iterable[EngineCoreOutputs]:
        """End the oldest step in flight. Return the outputs for clients."""
        sent = self._in_flight.popleft()
        result = self.worker.execute(sent)
        return self.scheduler.update_from_output(sent.step, result, now).values()

    def _describe_step(self, step: SchedulerOutput) -> _SentStep:
        expected = self.scheduler.get_step_in_flight(step)
        slots = expected.sampling.slots.tolist()
        requests = [self.scheduler.slots.requests[slot] for slot in slots]
        return _SentStep(
            step,
            [request.key for request in requests if request is not None],
            slots,
            None if expected.num_drafts is None else expected.num_drafts.tolist(),
            # Workers propose nothing in a step with a partial prompt.
            may_propose=len(slots) == len(expected.batch),
        )


class _Clients:
    """Records when each request got its tokens."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
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
            is_first = np.isnan(self._last[rows])
            self.first[rows[is_first]] = now
            self._gaps.append(now - self._last[rows[~is_first]])
            self._last[rows] = now
            self.num_tokens += len(message.token_ids) // 4
        self.ends += [(end.request_index, end.reason) for end in message.finished]
        if message.stats is not None:
            self.num_preemptions += message.stats.num_preemptions
            self.cached_tokens += message.stats.prefix_cache_hits

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


def simulate(
    setup: Setup,
    trace: Sequence[TraceRequest],
    step_time: StepTimeModel,
    num_replicas: int,
    drafts: DraftModel | None = None,
) -> SimulationResult:
    """Run a trace and return its totals.

    A new request goes to the replica with the fewest unfinished ones, as frontends route.

    Args:
        setup: The arguments of each replica's scheduler.
        trace: Requests sorted by arrival.
        step_time: The model of step times.
        num_replicas: How many replicas share the trace.
        drafts: The model of drafts, or None for no drafts.

    Raises:
        EngineError: Requests remain that can never be scheduled.
    """
    speculative = setup.config.speculative if drafts is not None else None
    if speculative is None:
        drafts = None
    config = msgspec.structs.replace(setup.config, speculative=speculative)
    setup = msgspec.structs.replace(setup, config=config)
    replicas = [_Replica(setup, step_time, drafts) for _ in range(num_replicas)]
    clients = _Clients(trace)
    # A heap of (end time, replica) of the steps in flight.
    ends: list[tuple[float, int]] = []
    now = 0.0
    num_arrived = 0

    def advance(index: int, messages: Iterable[EngineCoreOutputs]) -> None:
        replica = replicas[index]
        for end in replica.schedule(now):
            heapq.heappush(ends, (end, index))
        for message in (*messages, *replica.scheduler.take_outputs(now).values()):
            clients.receive_outputs(message, now)
            ended = int32_list(message.finished_set)
            replica.num_unfinished -= len(ended)
            for request_index in ended:
                replica.worker.remove_request((0, request_index))

    while num_arrived < len(trace) or ends:
        if num_arrived < len(trace) and (not ends or trace[num_arrived].arrival <= ends[0][0]):
            request = trace[num_arrived]
            now = max(now, request.arrival)
            index = min(range(num_replicas), key=lambda i: replicas[i].num_unfinished)
            replica = replicas[index]
            message = request.message(num_arrived, setup.cache_config.block_size)
            replica.scheduler.add_request(0, message, now)
            replica.num_unfinished += 1
            num_arrived += 1
            advance(index, ())
        else:
            now, index = heapq.heappop(ends)
            advance(index, replicas[index].finish_step(now))
    num_stuck = sum(replica.num_unfinished for replica in replicas)
    if num_stuck:
        raise EngineError(
            f"{num_stuck} requests can never be scheduled: there are too few KV-cache blocks"
        )
    num_finished = clients.count(FinishReason.LENGTH)
    num_expired = clients.count(FinishReason.EXPIRED)
    return SimulationResult(
        latencies=clients.latencies(),
        seconds=now,
        num_finished=num_finished,
        num_refused=len(trace) - num_finished - num_expired,
        num_expired=num_expired,
        prompt_tokens=sum(
            trace[index].prompt_tokens
            for index in np.flatnonzero(~np.isnan(clients.first)).tolist()
        ),
        output_tokens=clients.num_tokens,
        num_preemptions=clients.num_preemptions,
        cached_tokens=clients.cached_tokens,
        draft_tokens=sum(replica.worker.num_drafts for replica in replicas),
        accepted_tokens=sum(replica.worker.num_accepted for replica in replicas),
    )
