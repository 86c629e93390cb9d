"""Move requests through their states: queued, running, preempted, finished.

All slots and blocks are given up in one place, `RequestLifecycle._vacate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from ...protocol.arrays import int32_bytes, pack_int32
from ...protocol.messages import (
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    KVConnectorStats,
    SchedulerStats,
)
from ...protocol.worker_messages import NewRequestData
from ..kv_cache.connector import RequestEnd
from ..kv_cache.handoff import KVHandoff
from ..kv_cache.manager import Claim, KVCacheManager, Prefix
from ..kv_cache.reservations import Reservations
from ..state.request import FINISHED, RUNNING, Request, RequestKey, RequestStatus
from ..state.running_requests import RunningRequests
from ..state.slots import as_array
from ..state.steps_in_flight import PreemptedRow, StepsInFlight
from .client_outputs import ClientOutputs
from .features.encoder_inputs import EncoderInputs
from .features.grammars import Grammars
from .features.lora_cache import LoraCache
from .features.poison_isolation import PoisonIsolation
from .features.speculative import Drafts
from .limits import Requirements
from .queues.backlog import AdmissionRate, TenantLimits
from .queues.blocked_request import BlockedRequest
from .queues.deadlines import Deadlines, describe_expiry
from .queues.request_queue import RequestQueue
from .refusals import Refusals

End: TypeAlias = tuple[Request, FinishReason, int | None, str]
"""(request, finish reason, stop token unless it is an end-of-sequence token, error message)."""

_QUEUED: Final = EventKind.QUEUED
_SCHEDULED: Final = EventKind.SCHEDULED


class Transfers(Protocol):
    """The methods of a KV connection that `RequestLifecycle` calls. `KVTransfers` implements this protocol."""

    stats: KVConnectorStats

    def finish_request(self, request: Request, reason: FinishReason) -> RequestEnd:
        """Report a request to the connector before its blocks are freed."""

    def take_stats(self) -> KVConnectorStats:
        """Return counts since the last call."""

    def record_vacated(self, slot: int, last_step: int) -> None:
        """Record that steps up to `last_step` still use the blocks of a slot; 0 for none."""


class RequestLifecycle:
    """Owns every unfinished request, and applies each state change to all structures that refer to the request."""

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
        loras: LoraCache,
        tenants: TenantLimits | None,
        drafts: Drafts | None = None,
    ) -> None:
        self._drafts = drafts
        self.requests: dict[RequestKey, Request] = {}
        self.stats = SchedulerStats()
        self.reported_counts = 0, 0
        """The numbers of running and waiting requests that the frontends show."""
        self.step_tokens: list[int] = []
        """Number of prompt and output tokens computed by each step since the last statistics."""
        self.queue = queue
        self.poison_isolation = PoisonIsolation(queue)
        self.running = running
        self.clients = clients
        self.grammars = grammars
        self.encoders = encoders
        self.manager = manager
        self.tenants = tenants
        self.reservations = Reservations(manager)
        self.handoff = KVHandoff(manager, self.reservations)
        self.transfers: Transfers | None = None
        self.in_flight = StepsInFlight()
        self.loras = loras
        self.requirements = requirements
        self._max_total_tokens = requirements.max_total_tokens
        self._max_num_seqs = len(running.slots.requests)
        self._num_arrivals = 0
        self._num_queued_tokens = 0
        self._rate = AdmissionRate()
        self.refusals = Refusals(requirements, clients, tenants, self._rate)
        self.deadlines = Deadlines()
        self.blocked = BlockedRequest(manager.pool)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, which have no slot."""
        return len(self.requests) - len(self.running)

    def add_request(
        self, client_index: int, message: EngineCoreRequest, now: float
    ) -> Request | None:
        """Queue a request. Return None if it is refused, or is already known."""
        self.clients.add_client(client_index)
        if (client_index, message.request_index) in self.requests:
            return None
        # The first `max_num_seqs` requests do not count as queued, even before they get slots.
        num_queued = max(len(self.requests) - self._max_num_seqs, 0)
        if self.refusals.refuse(client_index, message, num_queued, self._num_queued_tokens):
            return None
        request = Request(client_index, message, self._num_arrivals, now)
        self._num_arrivals += 1
        self._num_queued_tokens += request.num_tokens
        self.requests[request.key] = request
        if message.was_index >= 0:
            self.handoff.claim_blocks(request, message.was_index)
        if self.tenants is not None:
            self.tenants.record_arrival(request.tenant)
        self.clients.record_event(request, _QUEUED, now)
        if message.is_suspect:
            self.poison_isolation.add_suspect(request)
        if request.deadline:
            self.deadlines.add_request(request)
        if request.encoder_inputs:
            self.encoders.are_in_use = True
        if request.lora is not None:
            self.loras.record_arrival(request.lora)
        if request.params.structured_output is not None and self.grammars.start(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            request.is_untouched = False
        elif request.awaits_input:
            request.status = RequestStatus.WAITING_FOR_INPUT
        else:
            self.queue.add_request(request)
        return request

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        """Queue a request whose grammar, or whose next mask, is ready; finish it if that failed."""
        request = self.requests.get(key)
        if request is None:
            return
        if error is not None:
            self.finish_request(request, FinishReason.ERROR, message=error)
        elif not request.has_grammar:
            request.has_grammar = True
            if not self.grammars.accept_output(request):
                self.finish_request(
                    request,
                    FinishReason.ERROR,
                    message="the output tokens that the request was resubmitted with do not match its grammar",
                )
            elif request.output_token_ids and self.grammars.is_isolated(request):
                request.awaits_mask = True
            else:
                request.status = RequestStatus.WAITING
                self.queue.requeue(request)
        elif request.awaits_mask:
            self._end_mask_wait(request)

    def _end_mask_wait(self, request: Request) -> None:
        """Let a request with an isolated grammar continue, because its next token bitmask has arrived."""
        request.awaits_mask = False
        if request.status is RUNNING:
            self.running.awaiting_masks.discard(request.slot)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._queue_again(request)

    def end_input_wait(self, request: Request) -> None:
        """Queue a request that waited for encoder inputs, if it has enough now."""
        if request.status is RequestStatus.WAITING_FOR_INPUT and not request.awaits_input:
            self._queue_again(request)

    def _queue_again(self, request: Request) -> None:
        """Queue a request that waited for something else."""
        if request.num_admissions:
            self._restore_preempted(request)
        else:
            request.status = RequestStatus.WAITING
            self.queue.requeue(request)

    def end_lora_load(self, number: int, error: str | None) -> None:
        """Queue the requests that waited for a LoRA adapter to load; finish them if loading failed."""
        adapter = self.loras.end_load(number, is_loaded=error is None)
        if error is not None and adapter is not None:
            ends: list[End] = [
                (request, FinishReason.IGNORED, None, error)
                for request in self.requests.values()
                if request.lora == adapter
            ]
            self.finish_requests(ends)

    def finish_expired(self, now: float) -> None:
        """Finish the requests that are past their deadline."""
        for request, deadline in self.deadlines.pop_expired(now):
            num_queued = max(len(self.requests) - self._max_num_seqs, 0)
            self.finish_request(
                request,
                FinishReason.EXPIRED,
                message=describe_expiry(request, deadline),
                retry_after_s=self._rate.estimate_seconds(num_queued),
            )
        self.deadlines.remove_finished(len(self.requests))

    def wait_for_load(self, request: Request) -> None:
        """Take the first request out of the queue until a KV connector has loaded its blocks."""
        self.queue.pop_request()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.is_untouched = False

    def requeue_loaded(self, request: Request) -> None:
        """Put a request back into the queue after its asynchronous load has ended."""
        was_running = request.num_admissions > 0
        request.status = RequestStatus.PREEMPTED if was_running else RequestStatus.WAITING
        self.queue.requeue(request)

    def count_lookup(self, request: Request, prefix: Prefix, num_external: int) -> None:
        """Count the cache hits of a request's first lookup; later lookups are not counted."""
        if request.num_cached_tokens >= 0:
            return
        request.num_cached_tokens = 0
        if request.is_warm_up:
            return
        if self.manager.prefix_cache.may_read(request) and not prefix.is_reserved:
            self.stats.prefix_cache_queries += request.num_tokens
            self.stats.prefix_cache_hits += prefix.num_tokens
            if prefix.blocks.loads:
                num_present = prefix.num_cached_blocks * self.manager.block_size
                self.stats.cpu_offload_hits += prefix.num_tokens - num_present
        if self.transfers is not None:
            stats = self.transfers.stats
            stats.prefix_cache_queries += request.num_tokens - prefix.num_tokens
            stats.prefix_cache_hits += num_external

    def start_requests(self, claims: Sequence[Claim], now: float) -> list[NewRequestData]:
        """Give admitted requests their slots and blocks. Return the messages to the workers."""
        requests = [claim.request for claim in claims]
        self.manager.allocate_claimed(claims)
        num_cached: list[int] = []
        num_computed: list[int] = []
        token_ids: list[bytes] = []
        for claim in claims:
            request, prefix, num_external = claim.request, claim.prefix, claim.num_external
            cached = prefix.num_tokens + num_external
            num_cached.append(cached)
            num_computed.append(cached + claim.num_granted)
            token_ids.append(request.prompt_token_ids + request.output_token_ids)
            self._num_queued_tokens -= request.num_tokens
            if not request.num_admissions:
                if request.num_cached_tokens < 0:
                    self.count_lookup(request, prefix, num_external)
                request.num_cached_tokens = cached
            request.has_untrusted_blocks = num_external > 0
            request.status = RUNNING
            if self.tenants is not None:
                self.tenants.record_start(request.tenant, request.queued_at, now)
        self._rate.record_admissions([request.queued_at for request in requests], now)
        num_certain = self.running.add_requests(
            requests, num_computed, list(map(self.max_output_tokens, requests))
        )
        self.manager.assign_slots(claims, num_certain)
        self.queue.record_scheduled(requests, num_cached)
        self.clients.record_events(requests, _SCHEDULED, now)
        return [
            NewRequestData(
                slot=request.slot,
                request_id=request.key,
                token_ids=tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=cached,
                block_ids=tuple(map(pack_int32, claim.tables)),
                sampling_params=request.params,
                eos_token_ids=request.eos_token_ids,
                lora_number=-1 if request.lora is None else self.loras.use(request.lora),
                encoder_inputs=request.encoder_inputs,
                arrival_time=request.arrival_time,
                predicted_token_ids=request.predicted_token_ids,
                pooling_params=request.pooling_params,
            )
            for request, claim, tokens, cached in zip(
                requests, claims, token_ids, num_cached, strict=True
            )
        ]

    def max_output_tokens(self, request: Request) -> int:
        """Return the maximum number of output tokens of a request; 1, which needs no space, for a pooling request."""
        max_output = max(self._max_total_tokens - request.num_prompt_tokens, 1)
        max_tokens = request.max_tokens
        return max_output if max_tokens is None or max_tokens > max_output else max_tokens

    def preempt(self, slot: int, now: float, *, keeps_tokens: bool = True) -> None:
        """Free the slot and blocks of a running request, and put it back into the queue at its place.

        With `keeps_tokens`, it first waits for its tokens in flight and keeps them. It then makes progress each time it
        runs, however scarce blocks are.
        """
        request = self.running[slot]
        row: PreemptedRow | None = None
        if keeps_tokens:
            generation = int(self.running.slots.generation[slot])
            last_step = self.in_flight.find_last_sampling_step(slot, generation)
            if last_step:
                blocks = list(self.manager.blocks[0][slot]) if self.transfers is not None else []
                drafts = [] if self._drafts is None else self._drafts.get_drafts(slot)
                row = PreemptedRow(
                    request, slot, generation, last_step, blocks, int32_bytes(drafts)
                )
        output_token_ids = self.running.slots.output_token_ids(slot)
        request.output_token_ids = output_token_ids.tobytes()
        request.num_tokens = request.num_prompt_tokens + len(output_token_ids)
        self._vacate([request], is_preempted=True)
        if self.tenants is not None:
            self.tenants.record_stop(request.tenant)
        self._num_queued_tokens += request.num_tokens
        if row is not None:
            request.status = RequestStatus.PREEMPTED_IN_FLIGHT
            self.in_flight.preempted.append(row)
        else:
            request.prompt_logprobs = None
            self._restore_preempted(request)
        self.stats.num_preemptions += 1
        self.clients.record_event(request, EventKind.PREEMPTED, now)

    def _restore_preempted(self, request: Request) -> None:
        if request.awaits_mask:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        elif request.awaits_input:
            request.status = RequestStatus.WAITING_FOR_INPUT
        else:
            request.status = RequestStatus.PREEMPTED
            self.queue.requeue(request)

    def drop_tokens_in_flight(self, rows: Sequence[PreemptedRow]) -> None:
        """Put preempted requests back into the queue, and drop their tokens in flight."""
        dropped = {row.request for row in rows}
        kept = [row for row in self.in_flight.preempted if row.request not in dropped]
        self.in_flight.preempted = kept
        for row in rows:
            if not row.request.is_finished:
                row.request.prompt_logprobs = None
                self._restore_preempted(row.request)

    def append_late_tokens(self, request: Request, token_ids: bytes) -> None:
        """Append tokens that were still in flight when the request was preempted."""
        num_tokens = len(token_ids) // 4
        request.output_token_ids += token_ids
        request.num_tokens += num_tokens
        self._num_queued_tokens += num_tokens

    def requeue_preempted(self, step: int) -> None:
        """Requeue the preempted requests whose last tokens in flight arrived with a step."""
        for request in self.in_flight.pop_completed(step):
            if not request.is_finished:
                self._restore_preempted(request)

    def invalidate_blocks(self, request: Request) -> None:
        """Make the blocks that a running request computed unfindable, because their contents may be wrong.

        The cached prefix that it started from stays. A request can cause NaNs by its parameters, and this must not
        evict a prefix that other requests share.
        """
        num_found = request.num_cached_tokens
        self.manager.invalidate_blocks(request, num_found // self.manager.block_size)
        self.encoders.invalidate_inputs(request, num_found)

    def fail_requests(self, reasons: dict[Request, str]) -> None:
        """Finish each request with an error message. The blocks that it computed stay in the prefix cache."""
        error = FinishReason.ERROR
        self.finish_requests(
            [(request, error, None, reason) for request, reason in reasons.items()]
        )

    def finish_request(
        self,
        request: Request,
        reason: FinishReason,
        *,
        message: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """Finish a request and free everything that it holds."""
        self.finish_requests([(request, reason, None, message)], retry_after_s)

    def finish_requests(self, ends: Iterable[End], retry_after_s: float = 0.0) -> None:
        """Finish requests and free everything that they hold."""
        leaving: list[Request] = []
        for request, reason, stop_reason, message in ends:
            del self.requests[request.key]
            params = None
            if self.transfers is not None:
                try:
                    params = self.transfers.finish_request(request, reason).params
                except Exception as error:
                    if reason is not FinishReason.ABORT:
                        reason, stop_reason = FinishReason.ERROR, None
                        message = message or f"KV connector: {error}"
            was = request.status
            request.status = FINISHED[reason]
            request.is_finished = True
            request.is_untouched = False
            if was is RUNNING:
                leaving.append(request)
            else:
                self._num_queued_tokens -= request.num_tokens
                if was in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    self.queue.remove_request(request)
            if request.num_reserved_tokens:
                self.reservations.end_reservation(request)
            if request.lora is not None:
                self.loras.record_end(request.lora)
            if request.params.structured_output is not None:
                self.grammars.release(request)
            if self.poison_isolation.suspects:
                self.poison_isolation.clear_suspect(request)
            if self.tenants is not None:
                if was is RUNNING:
                    self.tenants.record_stop(request.tenant)
                self.tenants.record_end(request.tenant)
            finished = FinishedRequest(
                request.request_index,
                reason,
                stop_reason,
                message,
                params,
                retry_after_s,
                request.trace_headers,
            )
            self.clients.finish_request(request.client_index, finished)
        if leaving:
            self._vacate(leaving)

    def make_stats(self) -> SchedulerStats:
        """Return current gauges, and counts since the last call."""
        stats, self.stats = self.stats, SchedulerStats()
        stats.num_running = num_running = len(self.running)
        stats.num_waiting = len(self.requests) - num_running
        self.reported_counts = num_running, stats.num_waiting
        stats.num_deferred = stats.num_waiting - len(self.queue)
        self.loras.write_stats(stats, self.running.loras)
        if self.step_tokens:
            # The tokens of a warm-up request are 0.
            stats.step_tokens = pack_int32([count for count in self.step_tokens if count])
            self.step_tokens = []
        self.manager.write_stats(stats)
        if self.transfers is not None:
            stats.kv_connector = self.transfers.take_stats()
        return stats

    def _vacate(self, requests: list[Request], *, is_preempted: bool = False) -> None:
        """Free the slots, blocks and encoder inputs of running requests that finish or are preempted."""
        state = self.running.slots
        self.queue.record_unscheduled(requests)
        if self.transfers is not None:
            for request in requests:
                generation = int(state.generation[request.slot])
                last_step = self.in_flight.find_last_step(request.slot, generation)
                self.transfers.record_vacated(request.slot, last_step)
        slots = as_array([request.slot for request in requests])
        certain = np.minimum(state.num_computed_tokens[slots], state.num_known_tokens(slots))
        self.manager.free_requests(requests, certain.tolist(), is_preempted=is_preempted)
        if self.encoders.are_in_use:
            for request in requests:
                self.encoders.release_request(request)
        self.running.remove_requests(requests)
