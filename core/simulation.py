"""The scheduler in virtual time: what a number of replicas would make of a trace."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..protocol.arrays import int32_view
from ..protocol.errors import EngineError
from ..protocol.messages import EngineCoreOutputs, FinishReason, ModelRunnerOutput, SchedulerOutput
from .recorded_scheduler import Setup
from .slots import Float64Array
from .step_rows import StepRows
from .step_time import StepTimeModel, measure_load
from .trace import TraceRequest

PERCENTILES = (50, 90, 99)


class Latencies(NamedTuple):
    """In seconds: of the first token after the arrival, between tokens, of the last token after the arrival."""

    first_token: Float64Array
    inter_token: Float64Array
    whole: Float64Array


class SimulationResult(NamedTuple):
    """`seconds` is from the first arrival to the last token. Every request is finished, refused or expired."""

    latencies: Latencies
    seconds: float
    num_finished: int
    num_refused: int
    num_expired: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    cached_tokens: int

    def summary(self) -> dict[str, float]:
        """Rates a second, latencies in milliseconds."""
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
        }
        names = ("ttft", "itl", "e2e")
        for name, values in zip(names, self.latencies, strict=True):
            for percentile in PERCENTILES:
                value = float(np.percentile(values, percentile)) if len(values) else 0.0
                summary[f"{name}_p{percentile}_ms"] = round(1e3 * value, 3)
        return summary


class _Replica:
    """One scheduler and one worker that executes steps in order."""

    def __init__(self, setup: Setup, step_time: StepTimeModel) -> None:
        self.scheduler = setup.make_scheduler()
        self.scheduler.add_client(0)
        self.num_unfinished = 0
        self._step_time = step_time
        self._max_in_flight = setup.config.max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, int]] = deque()
        self._busy_until = 0.0
        self._rows = StepRows()

    def schedule(self, now: float) -> list[float]:
        """Send what can be sent. Returns when those steps will be done."""
        ends = []
        while len(self._in_flight) < self._max_in_flight and self.scheduler.has_requests():
            step = self.scheduler.schedule(now)
            if step is None:
                break
            counts = self._rows.read(step)
            load = measure_load(self._rows.slots, counts, self.scheduler.slots)
            seconds = self._step_time.seconds(load) if load.tokens else 0.0
            self._busy_until = max(now, self._busy_until) + seconds
            self._in_flight.append((step, self.scheduler.count_samples(step)))
            ends.append(self._busy_until)
        return ends

    def take_output(self, now: float) -> Iterable[EngineCoreOutputs]:
        """The oldest step is done."""
        step, num_samples = self._in_flight.popleft()
        result = ModelRunnerOutput(step.step, bytes(4 * num_samples))
        return self.scheduler.update_from_output(step, result, now).values()


class _Clients:
    """When each request got its tokens."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._arrival = np.array([request.arrival for request in trace])
        self._last = np.full(len(trace), np.nan)
        self._gaps: list[Float64Array] = []
        self.first = np.full(len(trace), np.nan)
        self.ends: list[tuple[int, FinishReason]] = []
        self.num_tokens = self.num_preemptions = self.cached_tokens = 0

    def hear(self, message: EngineCoreOutputs, now: float) -> None:
        rows = int32_view(message.request_indices)
        if len(rows):
            is_first = np.isnan(self._last[rows])
            self.first[rows[is_first]] = now
            self._gaps.append(now - self._last[rows[~is_first]])
            self._last[rows] = now
            self.num_tokens += len(rows)
        self.ends += [(end.request_index, end.reason) for end in message.finished]
        if message.stats is not None:
            self.num_preemptions += message.stats.num_preemptions
            self.cached_tokens += message.stats.prefix_cache_hits

    def latencies(self) -> Latencies:
        finished = [index for index, reason in self.ends if reason is FinishReason.LENGTH]
        started = ~np.isnan(self.first)
        return Latencies(
            (self.first - self._arrival)[started],
            np.concatenate(self._gaps) if self._gaps else np.zeros(0),
            (self._last - self._arrival)[finished],
        )

    def count(self, reason: FinishReason) -> int:
        return sum(ended is reason for _, ended in self.ends)


def simulate(
    setup: Setup, trace: Sequence[TraceRequest], step_time: StepTimeModel, num_replicas: int
) -> SimulationResult:
    """Run a trace, which must be sorted by arrival. As the frontends do, the replica with the least to do gets the next
    request. Raises EngineError if the requests that are left can never go on."""
    replicas = [_Replica(setup, step_time) for _ in range(num_replicas)]
    clients = _Clients(trace)
    # (time, replica) of steps that will be done; those of one replica are done in order.
    ends: list[tuple[float, int]] = []
    now = 0.0
    num_arrived = 0

    def advance(index: int, messages: Iterable[EngineCoreOutputs]) -> None:
        replica = replicas[index]
        for end in replica.schedule(now):
            heapq.heappush(ends, (end, index))
        for message in (*messages, *replica.scheduler.take_outputs(now).values()):
            clients.hear(message, now)
            replica.num_unfinished -= len(message.finished_set) // 4

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
            advance(index, replicas[index].take_output(now))
    num_stuck = sum(replica.num_unfinished for replica in replicas)
    if num_stuck:
        raise EngineError(
            f"{num_stuck} requests can never go on: there are too few KV-cache blocks"
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
    )
