"""What happens to a request from its arrival to its end, whichever part of the scheduler decides it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from ..protocol.arrays import float32_bytes
from ..protocol.messages import (
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    NewRequestData,
    SchedulerStats,
)
from .backlog import AdmissionRate, TenantLimits
from .client_outputs import ClientOutputs
from .encoder_inputs import EncoderInputs
from .grammars import Grammars
from .inheritance import Inheritance
from .kv_cache_manager import Claim, KVCacheManager, Prefix
from .quarantine import Quarantine
from .request import FINISHED, RUNNING, Request, RequestKey, RequestStatus
from .request_queue import RequestQueue
from .requirements import Refusal, Requirements
from .reservations import Reservations
from .running_requests import RunningRequests
from .slots import as_array

if TYPE_CHECKING:
    from .kv_transfers import KVTransfers


End: TypeAlias = tuple[Request, FinishReason, int | None, str]
"""A request, why it ends, the token that ended it unless that is an end of sequence, and the message."""

_QUEUED: Final = EventKind.QUEUED
_SCHEDULED: Final = EventKind.SCHEDULED

_MIN_ENDED = 64
"""Deadlines of requests that have ended are swept out when they outnumber the others by this."""


class Start(msgspec.Struct, frozen=True, gc=False):
    """What an admitted request begins with.

    `num_external` tokens after the prefix are loaded by the step itself, and `granted` ones computed.
    """

    claim: Claim
    num_external: int
    granted: int


class RequestLifecycle:
    """Owns every live request, and keeps slots, blocks, queue, grammars and clients in step with each other."""

    def __init__(
        self,
        *,
        requirements: Requirements,
        manager: KVCacheManager,
        running: RunningRequests,
        queue: RequestQueue,
        clients: ClientOutputs,
        grammars: Grammars,
        encoders: EncoderInputs,
        tenants: TenantLimits | None,
    ) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self.stats = SchedulerStats()
        self.queue = queue
        self.quarantine = Quarantine(queue)
        self.running = running
        self.clients = clients
        self.grammars = grammars
        self._encoders = encoders
        self.manager = manager
        self.tenants = tenants
        self.reservations = Reservations(manager)
        self.inheritance = Inheritance(manager, self.reservations)
        self.transfers: KVTransfers | None = None
        self._requirements = requirements
        self._max_total_tokens = requirements.max_total_tokens
        self._max_num_seqs = len(running.slots.requests)
        self._num_arrivals = 0
        self._num_queued_tokens = 0
        self._rate = AdmissionRate()
        self._deadlines: list[tuple[float, int, Request]] = []

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    def add(self, client_index: int, message: EngineCoreRequest, now: float) -> Request | None:
        """Queue a request. Returns None when it is refused, or known already."""
        self.clients.open(client_index)
        if (client_index, message.request_index) in self.requests:
            return None
        # As many requests as there are slots do not count as queued.
        num_queued = len(self.requests) - self._max_num_seqs
        if num_queued < 0:
            num_queued = 0
        num_queued_of_tenant = 0
        if self.tenants is not None:
            num_queued_of_tenant = self.tenants.num_queued(message.tenant, num_queued)
        try:
            refusal = self._requirements.refuse(
                message, num_queued, self._num_queued_tokens, num_queued_of_tenant
            )
        except Exception as error:
            # Nothing has changed yet: this is the end of one request alone.
            refusal = Refusal(FinishReason.ERROR, f"this request cannot be read: {error!r}")
        if refusal is not None:
            reason, text = refusal
            retry_after_s = 0.0
            if reason is FinishReason.REJECTED:
                retry_after_s = self._rate.seconds_for(num_queued)
            elif reason is FinishReason.THROTTLED and self.tenants is not None:
                retry_after_s = self.tenants.seconds_for(message.tenant, num_queued_of_tenant)
            finished = FinishedRequest(
                message.request_index, reason, message=text, retry_after_s=retry_after_s
            )
            self.clients.finish(client_index, finished)
            return None
        request = Request(client_index, message, self._num_arrivals, now)
        self._num_arrivals += 1
        self._num_queued_tokens += request.num_tokens
        self.requests[request.key] = request
        if message.was_index >= 0:
            self.inheritance.claim(request, message.was_index)
        if self.tenants is not None:
            self.tenants.arrived(request.tenant)
        self.clients.event(request, _QUEUED, now)
        if message.is_suspect:
            self.quarantine.add(request)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
        if request.encoder_inputs:
            self._encoders.are_in_use = True
        if request.params.structured_output is not None and self.grammars.start(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        else:
            self.queue.add(request)
        return request

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        request = self.requests.get(key)
        if request is None or request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
            return
        if error is not None:
            self.finish(request, FinishReason.ERROR, message=error)
        elif not self.grammars.accept_output(request):
            self.finish(request, FinishReason.ERROR, message="its tokens break the grammar")
        else:
            request.status = RequestStatus.WAITING
            self.queue.restore(request)

    def is_deadline_past(self, now: float) -> bool:
        """Whether `expire` may have something to do."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def expire(self, now: float) -> None:
        """End the requests that are past their deadline; those that wait have cost nothing yet."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].is_finished):
            deadline, _, request = heapq.heappop(deadlines)
            if request.is_finished:
                continue
            did = "waited in the queue" if request.status < RUNNING else "was running"
            self.finish(
                request,
                FinishReason.EXPIRED,
                message=f"the request {did} at its deadline, {max(deadline - request.queued_at, 0):.3f} s "
                "after it came",
                retry_after_s=self._rate.seconds_for(
                    max(len(self.requests) - self._max_num_seqs, 0)
                ),
            )
        if len(deadlines) > 2 * len(self.requests) + _MIN_ENDED:
            self._deadlines = [entry for entry in deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)

    def wait_for_load(self, request: Request) -> None:
        """The first request of the queue waits for its blocks to be filled."""
        self.queue.pop()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def load_ended(self, request: Request) -> None:
        """A request is to be admitted with what was loaded for it."""
        was_running = request.num_admissions > 0
        request.status = RequestStatus.PREEMPTED if was_running else RequestStatus.WAITING
        self.queue.restore(request)

    def count_lookup(self, request: Request, prefix: Prefix, num_external: int) -> None:
        """Count once for each request what was found in the caches when it was first looked up."""
        if request.num_cached_tokens >= 0:
            return
        request.num_cached_tokens = 0
        if self.manager.prefix_cache.is_read_for(request) and not prefix.is_reserved:
            self.stats.prefix_cache_queries += request.num_tokens
            self.stats.prefix_cache_hits += prefix.num_tokens
            if prefix.blocks.loads:
                num_present = prefix.num_cached_blocks * self.manager.block_size
                self.stats.host_cache_hits += prefix.num_tokens - num_present
        if self.transfers is not None:
            stats = self.transfers.stats
            stats.prefix_cache_queries += request.num_tokens - prefix.num_tokens
            stats.prefix_cache_hits += num_external

    def start(self, starts: Sequence[Start], now: float) -> list[NewRequestData]:
        """Give requests that have left the queue their slots, blocks and first tokens to compute."""
        claims = [start.claim for start in starts]
        requests = [claim.request for claim in claims]
        self.manager.fulfil(claims)
        num_cached: list[int] = []
        num_computed: list[int] = []
        token_ids: list[bytes] = []
        for start, request in zip(starts, requests, strict=True):
            prefix, num_external = start.claim.prefix, start.num_external
            cached = prefix.num_tokens + num_external
            num_cached.append(cached)
            num_computed.append(cached + start.granted)
            token_ids.append(request.prompt_token_ids + request.output_token_ids)
            self._num_queued_tokens -= request.num_tokens
            if not request.num_admissions:
                if request.num_cached_tokens < 0:
                    self.count_lookup(request, prefix, num_external)
                request.num_cached_tokens = cached
            request.has_untrusted_blocks = num_external > 0
            request.status = RUNNING
            self._rate.admitted(request.queued_at, now)
            if self.tenants is not None:
                self.tenants.started(request.tenant, request.queued_at, now)
        self.running.append(requests, num_computed, list(map(self.max_output_tokens, requests)))
        self.manager.assign(claims, num_computed)
        self.queue.entering(requests, num_cached)
        self.clients.events(requests, _SCHEDULED, now)
        return [
            NewRequestData(
                slot=request.slot,
                request_id=request.key,
                token_ids=tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=cached,
                block_ids=(array("i", claim.tables[0]).tobytes(),)
                if len(claim.tables) == 1
                else tuple([array("i", table).tobytes() for table in claim.tables]),
                sampling_params=request.params,
                eos_token_ids=request.eos_token_ids,
                lora_name=request.lora_name,
                encoder_inputs=request.encoder_inputs,
                arrival_time=request.arrival_time,
            )
            for request, claim, tokens, cached in zip(
                requests, claims, token_ids, num_cached, strict=True
            )
        ]

    def max_output_tokens(self, request: Request) -> int:
        """How many tokens a request may generate in all."""
        max_output = self._max_total_tokens - request.num_prompt_tokens
        max_tokens = request.params.max_tokens
        return max_output if max_tokens is None or max_tokens > max_output else max_tokens

    def preempt(self, slot: int, now: float) -> None:
        """Take everything from a running request but its tokens, and let it wait in its old place."""
        request = self.running[slot]
        output_token_ids = self.running.slots.output_token_ids(slot)
        request.output_token_ids = output_token_ids.tobytes()
        request.num_tokens = request.num_prompt_tokens + len(output_token_ids)
        self._vacate([request], is_preempted=True)
        if self.tenants is not None:
            self.tenants.stopped(request.tenant)
        request.status = RequestStatus.PREEMPTED
        request.prompt_logprobs = None
        self._num_queued_tokens += request.num_tokens
        self.queue.restore(request)
        self.stats.num_preemptions += 1
        self.clients.event(request, EventKind.PREEMPTED, now)

    def distrust(self, request: Request) -> None:
        """What a running request computes may be wrong: no other request is to find it.

        The blocks that it found at its admission stay: a request can cause NaNs by what it asks for, and must not be
        able to make all others lose the prefix that they share.
        """
        num_found = request.num_cached_tokens
        self.manager.distrust(request, num_found // self.manager.block_size)
        self._encoders.distrust(request, num_found)

    def fail_all(self, reasons: dict[Request, str]) -> None:
        """End requests that cannot go on, each for its own reason. What was computed of them is good."""
        error = FinishReason.ERROR
        self.finish_all([(request, error, None, reason) for request, reason in reasons.items()])

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        message: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """End a live request."""
        self.finish_all([(request, reason, None, message)], retry_after_s)

    def finish_all(self, ends: Iterable[End], retry_after_s: float = 0.0) -> None:
        """End live requests."""
        leaving: list[Request] = []
        for request, reason, stop_reason, message in ends:
            del self.requests[request.key]
            params = None
            if self.transfers is not None:
                try:
                    params = self.transfers.ending(request, reason).params
                except Exception as error:
                    if reason is not FinishReason.ABORT:
                        reason, stop_reason = FinishReason.ERROR, None
                        message = message or f"KV connector: {error}"
            was = request.status
            request.status = FINISHED[reason]
            request.is_finished = True
            if was is RUNNING:
                leaving.append(request)
            else:
                self._num_queued_tokens -= request.num_tokens
                if was in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    self.queue.discard(request)
            self.reservations.end(request)
            if request.params.structured_output is not None:
                self.grammars.release(request)
            if self.quarantine.suspects:
                self.quarantine.release(request)
            if self.tenants is not None:
                if was is RUNNING:
                    self.tenants.stopped(request.tenant)
                self.tenants.ended(request.tenant)
            finished = FinishedRequest(
                request.request_index, reason, stop_reason, message, params, retry_after_s
            )
            self.clients.finish(request.client_index, finished)
        if leaving:
            self._vacate(leaving)

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counts since the last call."""
        stats, self.stats = self.stats, SchedulerStats()
        stats.num_running = num_running = len(self.running)
        stats.num_waiting = len(self.requests) - num_running
        stats.num_deferred = stats.num_waiting - len(self.queue)
        pool, host = self.manager.pool, self.manager.host
        stats.kv_cache_usage = pool.usage
        if pool.lifetimes.has_news:
            lifetimes, idle_times, reuse_gaps = pool.lifetimes.take()
            stats.block_lifetimes = float32_bytes(lifetimes)
            stats.block_idle_times = float32_bytes(idle_times)
            stats.block_reuse_gaps = float32_bytes(reuse_gaps)
        if host is not None:
            stats.host_cache_usage = host.usage
            stats.num_blocks_copied_out, stats.num_blocks_copied_in = host.take_counts()
        if self.transfers is not None:
            stats.kv_connector = self.transfers.take_stats()
        return stats

    def _vacate(self, requests: list[Request], *, is_preempted: bool = False) -> None:
        state = self.running.slots
        self.queue.leaving(requests)
        slots = as_array([request.slot for request in requests])
        certain = np.minimum(state.num_computed_tokens[slots], state.num_known_tokens(slots))
        self.manager.free(requests, certain.tolist(), is_preempted=is_preempted)
        if self._encoders.are_in_use:
            for request in requests:
                self._encoders.release(request)
        self.running.remove(requests)
