"""Runs a trace on simulated replicas: the real scheduler in virtual time."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ...protocol.block_hash import block_keys
from ...protocol.errors import EngineError, counted
from ...protocol.messages import FinishReason
from ..replay.recorder import Setup
from .draft_model import DraftModel
from .fleet.clients import ClientRecords, Latencies, measure_latencies
from .fleet.remote_prefill import PrefillReplicas
from .fleet.router import Router
from .fleet.shard import Arrival, Report, Role, Scenario, Shard
from .fleet.shard_process import ShardProcess
from .frontend_times import NO_FRONTEND, FrontendTimes
from .step_time import StepTimeModel
from .trace import TraceRequest

NO_PREFILL = PrefillReplicas()
PERCENTILES = (50, 90, 99)

WINDOW: Final = 0.005
"""Seconds in which the router of several replicas gets no load updates, so that replicas can run on their own."""

MIN_REPLICAS: Final = 64
"""Number of replicas from which a process of its own pays off."""

MAX_PASSES: Final = 8


class SimulationResult(NamedTuple):
    """Totals of a simulation.

    `latencies` are those of all passes, and the other values are means of the passes. `seconds` is from the first
    arrival to the last token. Every request is finished, refused or expired.
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
    """The router of a fleet, which sends requests to the shards and applies their reports."""

    def __init__(self, scenario: Scenario, shards: Sequence[Shard | ShardProcess]) -> None:
        trace = scenario.trace
        self._scenario = scenario
        self._shards = shards
        max_num_seqs = scenario.setup.config.max_num_seqs
        self._router = Router(scenario.num_decode, max_num_seqs)
        self._prefill_router = Router(max(scenario.prefill.num_replicas, 1), max_num_seqs)
        delays = scenario.frontend.draw_submission(len(trace))
        self._arrivals = [
            (request.arrival + delay, index, Role.WHOLE)
            for index, (request, delay) in enumerate(zip(trace, delays, strict=True))
        ]
        """A heap of (time, request, role) that are not routed yet."""
        heapq.heapify(self._arrivals)
        self._sent: list[list[Arrival]] = [[] for _ in shards]
        self.num_unfinished = len(trace)

    def run(self) -> None:
        """Run until nothing is left to do."""
        window = WINDOW if self._scenario.num_replicas > 1 else math.inf
        next_event = math.inf
        while self._arrivals or any(self._sent) or next_event < math.inf:
            until = self._arrivals[0][0] if self._arrivals else math.inf
            if self._scenario.prefill.num_replicas:
                # A computed prompt becomes an arrival.
                starts = [sent[0].now for sent in self._sent if sent]
                until = min(until, min([*starts, next_event], default=math.inf) + window)
            for shard, sent in zip(self._shards, self._sent, strict=True):
                shard.start(sent, until)
            reports = [shard.wait() for shard in self._shards]
            next_event = min(report.next_event for report in reports)
            for report in reports:
                self._apply(report, until)
            self._sent = [[] for _ in self._shards]
            end = self._arrivals[0][0] + window if self._arrivals else 0.0
            while self._arrivals and self._arrivals[0][0] < end:
                self._send(*heapq.heappop(self._arrivals))

    def _send(self, now: float, request: int, role: Role) -> None:
        scenario = self._scenario
        index = 0
        if role is Role.DECODE:
            index = self._router.find_replica(request)
        elif scenario.num_replicas > 1:
            block_size = scenario.setup.cache_config.block_size
            keys = block_keys(scenario.trace[request].hashes(request, block_size))
            index = self._router.route(request, keys)
            num_missing = self._router.count_missing(request) * block_size
            if scenario.prefill.num_replicas and num_missing >= scenario.prefill.min_tokens:
                role = Role.PREFILL
                index = scenario.num_decode + self._prefill_router.route(request, keys)
        self._sent[index % len(self._shards)].append(Arrival(now, index, request, role))

    def _apply(self, report: Report, now: float) -> None:
        """Apply what happened in a shard."""
        self.num_unfinished -= len(report.ended)
        if self._scenario.num_replicas == 1:
            return
        self._router.remove_requests(report.ended)
        self._prefill_router.remove_requests(request for _, request in report.prefilled)
        for ended_at, request in report.prefilled:
            num_tokens = self._scenario.trace[request].prompt_tokens
            arrival = ended_at + num_tokens * self._scenario.prefill.seconds_per_token
            heapq.heappush(self._arrivals, (max(arrival, now), request, Role.DECODE))
        for index, update in report.updates:
            num_decode = self._scenario.num_decode
            if index < num_decode:
                self._router.apply_update(index, update)
            else:
                self._prefill_router.apply_update(index - num_decode, update)


def _run_pass(scenario: Scenario, num_processes: int) -> list[ClientRecords]:
    """Run a trace once and return the records of the clients.

    Raises:
        EngineError: Requests remain that can never be scheduled.
    """
    make_shard = ShardProcess if num_processes > 1 else Shard
    shards = [
        make_shard(scenario, range(first, scenario.num_replicas, num_processes))
        for first in range(num_processes)
    ]
    try:
        fleet = _Fleet(scenario, shards)
        fleet.run()
        records = [shard.finish() for shard in shards]
    finally:
        for shard in shards:
            shard.close()
    if fleet.num_unfinished:
        raise EngineError(
            f"{counted(fleet.num_unfinished, 'request')} can never be scheduled: there are too few KV-cache blocks; raise --num-blocks"
        )
    return records


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
    num_processes: int | None = None,
) -> SimulationResult:
    """Run a trace and return its totals.

    Requests are routed as by one frontend. If the trace has fewer steps than the log that the model was fitted to, it
    is run several times, each beginning elsewhere in the log, so that the result does not depend on a few slow steps.

    Args:
        setup: The arguments of each replica's scheduler.
        trace: Requests sorted by arrival.
        step_time: The model of step times.
        num_replicas: The number of replicas that share the trace.
        drafts: The model of drafts, or None for no drafts.
        frontend: The times that requests and tokens spend in the frontend.
        prefill: The prefill replicas among them.
        can_skip: True if steps in which every request decodes may be computed together. The result is the same.
        num_processes: The processes that share the replicas; by default one per core for large fleets. The result is
            the same.

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
    scenario = Scenario(setup, trace, step_time, num_replicas, drafts, frontend, prefill, can_skip)
    if num_processes is None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        num_processes = max(1, min(num_cores, num_replicas // MIN_REPLICAS))
    first = _run_pass(scenario, num_processes)
    num_steps = sum(each.num_steps for each in first)
    num_ratios = sum(map(len, step_time.ratios))
    num_passes = min(max(math.ceil(num_ratios / max(num_steps, 1)), 1), MAX_PASSES)
    others = (
        _run_pass(scenario._replace(number=number), num_processes)
        for number in range(1, num_passes)
    )
    return _merge(trace, [first, *others])


def _merge(
    trace: Sequence[TraceRequest], passes: Sequence[Sequence[ClientRecords]]
) -> SimulationResult:
    each = [measure_latencies(trace, records) for records in passes]
    latencies = Latencies(*map(np.concatenate, zip(*each, strict=True)))
    every = [record for records in passes for record in records]
    reasons = [reason for record in every for _, reason in record.ends]
    num_passes = len(passes)
    # Rounded so that requests that are lost in a single pass are not overlooked.
    num_finished = reasons.count(FinishReason.LENGTH) // num_passes
    num_expired = min(
        math.ceil(reasons.count(FinishReason.EXPIRED) / num_passes), len(trace) - num_finished
    )
    prompt_lengths = np.array([request.prompt_tokens for request in trace])
    started = (prompt_lengths[~np.isnan(record.first)].sum() for record in every)
    return SimulationResult(
        latencies=latencies,
        seconds=sum(max(each.last_event for each in records) for records in passes) / num_passes,
        num_finished=num_finished,
        num_refused=len(trace) - num_finished - num_expired,
        num_expired=num_expired,
        prompt_tokens=int(sum(started)) // num_passes,
        output_tokens=sum(record.num_tokens for record in every) // num_passes,
        num_preemptions=sum(record.num_preemptions for record in every) // num_passes,
        cached_tokens=sum(record.cached_tokens for record in every) // num_passes,
        draft_tokens=sum(record.num_drafts for record in every) // num_passes,
        accepted_tokens=sum(record.num_accepted for record in every) // num_passes,
    )
