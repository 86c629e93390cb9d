"""Runs a trace on simulated replicas: the real scheduler in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...protocol.arrays import Int32Array, int32_list
from ...protocol.errors import EngineError
from ...protocol.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from ..replay.recorder import Setup
from ..state.slots import Float64Array
from .clients import Clients, Latencies
from .draft_model import DraftModel
from .frontend_times import NO_FRONTEND, FrontendTimes
from .remote_prefill import PrefillReplicas, decode_request, decode_setup, prefill_request
from .replica import Replica
from .router import Router
from .step_time import StepTimeModel
from .trace import TraceRequest

NO_PREFILL = PrefillReplicas()
PERCENTILES = (50, 90, 99)


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


class _Fleet:
    """The replicas of a simulation, their routers and their clients. Prefill replicas follow the others.

    `events` is a heap of (time, number). If the number is a replica's, a step of that replica ends that must not be
    skipped; entries that are no longer its `next_event` are ignored. Higher numbers are requests whose prompts have
    been computed elsewhere.
    """

    def __init__(
        self,
        setup: Setup,
        trace: Sequence[TraceRequest],
        step_time: StepTimeModel,
        num_replicas: int,
        drafts: DraftModel | None,
        frontend: FrontendTimes,
        prefill: PrefillReplicas,
        *,
        can_skip: bool,
    ) -> None:
        is_one_of_several = num_replicas > 1
        self._prefill = prefill
        self._num_decode = num_replicas - prefill.num_replicas
        self._block_size = setup.cache_config.block_size
        self._waiting: dict[int, EngineCoreRequest] = {}
        self._num_requests = len(trace)
        self.router = Router(self._num_decode, setup.config.max_num_seqs)
        self._prefill_router = Router(max(prefill.num_replicas, 1), setup.config.max_num_seqs)
        self.clients = Clients(trace, frontend)
        self.events: list[tuple[float, int]] = []
        self.replicas = [
            Replica(
                decode_setup(setup) if prefill.num_replicas and index < self._num_decode else setup,
                step_time,
                drafts,
                index,
                self,
                can_skip=can_skip,
                log_kv_events=is_one_of_several,
            )
            for index in range(num_replicas)
        ]
        self._is_one_of_several = is_one_of_several

    def add_request(self, message: EngineCoreRequest, now: float) -> None:
        """Send a request to its replica, or its prompt to a prefill replica."""
        index = self.router.route(message)
        if self._prefill.num_replicas:
            num_missing = self.router.count_missing(message) * self._block_size
            if num_missing >= self._prefill.min_tokens:
                self._waiting[message.request_index] = message
                message = prefill_request(message, self._num_requests + message.request_index)
                index = self._num_decode + self._prefill_router.route(message)
        self._send(index, message, now)

    def _send(self, index: int, message: EngineCoreRequest, now: float) -> None:
        self.replicas[index].add_request(message, now)
        self._schedule_event(index)

    def handle_event(self, now: float, index: int) -> bool:
        """Handle an event of the heap. Return False if the event was outdated and thus ignored."""
        if index >= len(self.replicas):
            message = self._waiting.pop(index - len(self.replicas))
            replica_index = self.router.find_replica(message.request_index)
            self._send(replica_index, decode_request(message), now)
            return True
        replica = self.replicas[index]
        if replica.next_event != now:
            return False
        replica.finish_step()
        self._schedule_event(index)
        return True

    def receive_outputs(self, index: int, message: EngineCoreOutputs, now: float) -> None:
        """Deliver the outputs of a step of a replica."""
        if index >= self._num_decode:
            self._finish_prompts(index, int32_list(message.finished_set), now)
            return
        self.clients.receive_outputs(message, now)
        if message.finished_set:
            ended = int32_list(message.finished_set)
            self.router.remove_requests(ended)
            for request_index in ended:
                self.replicas[index].remove_request(request_index)

    def _finish_prompts(self, index: int, ended: list[int], now: float) -> None:
        """Send requests to their decode replicas when the keys and values of their prompts are there."""
        self._prefill_router.remove_requests(ended)
        for prefill_index in ended:
            self.replicas[index].remove_request(prefill_index)
            request_index = prefill_index - self._num_requests
            num_tokens = len(self._waiting[request_index].prompt_token_ids) // 4
            arrival = now + num_tokens * self._prefill.seconds_per_token
            heapq.heappush(self.events, (arrival, len(self.replicas) + request_index))

    def receive_steps(self, request_indices: Int32Array, times: Float64Array) -> None:
        """Deliver the outputs of skipped steps."""
        self.clients.receive_steps(request_indices, times)

    def _schedule_event(self, index: int) -> None:
        replica = self.replicas[index]
        if self._is_one_of_several and (events := replica.scheduler.take_kv_events()):
            is_decode = index < self._num_decode
            router = self.router if is_decode else self._prefill_router
            router.apply_events(index - (0 if is_decode else self._num_decode), events)
        if (time := replica.next_event) is not None:
            heapq.heappush(self.events, (time, index))


def simulate(
    setup: Setup,
    trace: Sequence[TraceRequest],
    step_time: StepTimeModel,
    num_replicas: int,
    drafts: DraftModel | None = None,
    frontend: FrontendTimes = NO_FRONTEND,
    prefill: PrefillReplicas = NO_PREFILL,
    *,
    can_skip: bool = True,
) -> SimulationResult:
    """Run a trace and return its totals.

    Requests are routed as by one frontend.

    Args:
        setup: The arguments of each replica's scheduler.
        trace: Requests sorted by arrival.
        step_time: The model of step times.
        num_replicas: How many replicas share the trace.
        drafts: The model of drafts, or None for no drafts.
        frontend: The times that requests and tokens spend in the frontend.
        prefill: The prefill replicas among them.
        can_skip: Whether steps in which every request decodes may be computed together. The result is the same.

    Raises:
        EngineError: Requests remain that can never be scheduled.
    """
    speculative = setup.config.speculative if drafts is not None else None
    if speculative is None:
        drafts = None
    config = msgspec.structs.replace(setup.config, speculative=speculative)
    setup = msgspec.structs.replace(setup, config=config)
    # A deadline may pass during any step and end a request, so no step can be skipped.
    can_skip = can_skip and not any(request.deadline for request in trace)
    fleet = _Fleet(
        setup, trace, step_time, num_replicas, drafts, frontend, prefill, can_skip=can_skip
    )
    clients, events = fleet.clients, fleet.events
    submissions = sorted(
        (request.arrival + delay, index)
        for index, (request, delay) in enumerate(
            zip(trace, frontend.draw_submission(len(trace)), strict=True)
        )
    )
    seconds = 0.0
    num_arrived = 0
    block_size = setup.cache_config.block_size
    while num_arrived < len(trace) or events:
        if num_arrived < len(trace) and (not events or submissions[num_arrived][0] <= events[0][0]):
            now, number = submissions[num_arrived]
            fleet.add_request(trace[number].message(number, block_size), now)
            num_arrived += 1
            seconds = now
        else:
            now, index = heapq.heappop(events)
            if fleet.handle_event(now, index):
                seconds = now
    if fleet.router.num_unfinished:
        raise EngineError(
            f"{fleet.router.num_unfinished} requests can never be scheduled: there are too few KV-cache "
            "blocks"
        )
    num_finished = clients.count(FinishReason.LENGTH)
    num_expired = clients.count(FinishReason.EXPIRED)
    return SimulationResult(
        latencies=clients.latencies(),
        seconds=seconds,
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
        draft_tokens=sum(replica.num_drafts for replica in fleet.replicas),
        accepted_tokens=sum(replica.num_accepted for replica in fleet.replicas),
    )
