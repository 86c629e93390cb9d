"""Some of the replicas of a simulated fleet, with the clients of their requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ....protocol.arrays import Int32Array, int32_list
from ....protocol.messages import EngineCoreOutputs, EngineCoreRequest, ReplicaLoadUpdate
from ...replay.recorder import Setup
from ...reporting.client_updates import ClientUpdates
from ...state.slots import Float64Array
from ..draft_model import DraftModel
from ..frontend_times import FrontendTimes
from ..step_time import StepTimeModel
from ..trace import TraceRequest
from .clients import ClientRecords, Clients
from .output_hashes import OutputHashes
from .remote_prefill import PrefillReplicas, decode_request, decode_setup, prefill_request
from .replica import Replica

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Scenario(NamedTuple):
    """A fleet and its requests.

    Attributes:
        setup: The arguments of each replica's scheduler.
        trace: Requests sorted by arrival.
        step_time: The model of step times.
        num_replicas: The number of replicas that share the trace. Prefill replicas follow the others.
        drafts: The model of drafts, or None for no drafts.
        frontend: The times that requests and tokens spend in the frontend.
        prefill: The prefill replicas among them.
        can_skip: True if steps in which every request decodes may be computed together.
        number: The number of the pass, which decides where each replica begins in the recorded ratios.
    """

    setup: Setup
    trace: Sequence[TraceRequest]
    step_time: StepTimeModel
    num_replicas: int
    drafts: DraftModel | None
    frontend: FrontendTimes
    prefill: PrefillReplicas
    can_skip: bool
    number: int = 0

    @property
    def num_decode(self) -> int:
        """The number of replicas that are no prefill replicas."""
        return self.num_replicas - self.prefill.num_replicas

    def phase(self, index: int) -> float:
        """Return at which share of the log a replica begins. These shares are spread evenly."""
        return (self.number * self.num_replicas + index) * GOLDEN_RATIO % 1


class Role(IntEnum):
    """The part of a request that a replica computes."""

    WHOLE = 0
    PREFILL = 1
    DECODE = 2


class Arrival(NamedTuple):
    """A request that reaches a replica: the time in seconds, the index of the replica, and the index of the request."""

    now: float
    replica: int
    request: int
    role: Role = Role.WHOLE


class Report(NamedTuple):
    """The news of a shard since its last report.

    Attributes:
        ended: The requests that ended.
        prefilled: The requests whose prompts a prefill replica has computed, and the times in seconds.
        updates: The load updates of replicas for the router.
        next_event: The time of the next event; infinity if every replica is idle.
    """

    ended: list[int]
    prefilled: list[tuple[float, int]]
    updates: list[tuple[int, ReplicaLoadUpdate]]
    next_event: float


class Shard:
    """Some of the replicas of a fleet. Each of them runs on its own between the arrivals that the router sends.

    Args:
        scenario: The fleet.
        indices: The replicas of this shard.
    """

    def __init__(self, scenario: Scenario, indices: Sequence[int]) -> None:
        self._scenario = scenario
        self._clients = Clients(scenario.trace, scenario.frontend, scenario.num_replicas)
        self._output_hashes = OutputHashes()
        self._replicas: dict[int, Replica] = {}
        self._updates: dict[int, ClientUpdates] = {}
        has_routing = scenario.num_replicas > 1
        for index in indices:
            is_decode = scenario.prefill.num_replicas and index < scenario.num_decode
            self._replicas[index] = Replica(
                decode_setup(scenario.setup) if is_decode else scenario.setup,
                scenario.step_time,
                scenario.drafts,
                index,
                self,
                self._output_hashes,
                phase=scenario.phase(index),
                can_skip=scenario.can_skip,
                log_kv_events=has_routing,
            )
            if has_routing:
                self._updates[index] = ClientUpdates()
                self._updates[index].add_client(0)
        self._events: list[tuple[float, int]] = []
        """A heap of (time, replica). Entries that are no longer the `next_event` of the replica are ignored."""
        self._last_event = 0.0
        self._ended: list[int] = []
        self._prefilled: list[tuple[float, int]] = []
        self._report = Report([], [], [], math.inf)

    def start(self, arrivals: Sequence[Arrival], until: float) -> None:
        """Add requests, sorted by time, and run every replica until a time. `wait` returns the report."""
        changed: set[int] = set()
        for arrival in arrivals:
            replica = self._replicas[arrival.replica]
            self._run_replica(replica, arrival.now)
            replica.add_request(self._message(arrival), arrival.now)
            self._last_event = max(self._last_event, arrival.now)
            changed.add(arrival.replica)
        for index in changed:
            self._push(index)
        while self._events and self._events[0][0] < until:
            now, index = heapq.heappop(self._events)
            if self._replicas[index].next_event == now:
                self._run_replica(self._replicas[index], until)
                self._push(index)
                changed.add(index)
        updates = []
        if self._updates:
            for index in changed:
                if events := self._replicas[index].scheduler.take_kv_events():
                    self._updates[index].apply_events(events)
                    updates += [
                        (index, update) for _, update in self._updates[index].take_updates()
                    ]
        next_event = self._events[0][0] if self._events else math.inf
        self._report = Report(self._ended, self._prefilled, updates, next_event)
        self._ended, self._prefilled = [], []

    def wait(self) -> Report:
        """Return the report of the last run."""
        return self._report

    def finish(self) -> ClientRecords:
        """Return the records of the clients."""
        replicas = self._replicas.values()
        return self._clients.records(
            self._last_event,
            sum(replica.num_steps for replica in replicas),
            sum(replica.num_drafts for replica in replicas),
            sum(replica.num_accepted for replica in replicas),
        )

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    def receive_outputs(self, index: int, message: EngineCoreOutputs, now: float) -> None:
        """Deliver the outputs of a step of a replica."""
        ended = int32_list(message.finished_set) if message.finished_set else []
        for request_index in ended:
            self._replicas[index].remove_request(request_index)
        if index < self._scenario.num_decode:
            self._clients.receive_outputs(index, message, now)
            self._ended += ended
        else:
            num_requests = len(self._scenario.trace)
            self._prefilled += [(now, request_index - num_requests) for request_index in ended]

    def receive_steps(self, index: int, request_indices: Int32Array, times: Float64Array) -> None:
        """Deliver the outputs of skipped steps."""
        self._clients.receive_steps(index, request_indices, times)

    def _run_replica(self, replica: Replica, until: float) -> None:
        """Run a replica, which does not depend on the others, to its last event before a time."""
        while (now := replica.next_event) is not None and now < until:
            replica.finish_step()
            self._last_event = max(self._last_event, now)

    def _push(self, index: int) -> None:
        if (time := self._replicas[index].next_event) is not None:
            heapq.heappush(self._events, (time, index))

    def _message(self, arrival: Arrival) -> EngineCoreRequest:
        trace, block_size = self._scenario.trace, self._scenario.setup.cache_config.block_size
        self._output_hashes.add_request(trace[arrival.request])
        message = trace[arrival.request].message(arrival.request, block_size)
        match arrival.role:
            case Role.WHOLE:
                return message
            case Role.PREFILL:
                return prefill_request(message, len(trace) + arrival.request)
            case Role.DECODE:
                return decode_request(message)
