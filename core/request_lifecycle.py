"""From arrival to end: what happens to a request, whoever decided it."""

from __future__ import annotations

import heapq
from array import array

from ..protocol.arrays import float32_bytes
from ..protocol.messages import (
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    NewRequestData,
    SchedulerStats,
)
from .cached_prefix import CachedPrefix
from .client_outputs import ClientOutputs
from .grammars import Grammars
from .kv_cache_manager import KVCacheManager
from .request import Request, RequestKey, RequestStatus
from .request_queue import RequestQueue
from .requirements import Requirements
from .running_requests import RunningRequests


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
    ) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self.stats = SchedulerStats()
        self.queue = queue
        self.running = running
        self.clients = clients
        self.grammars = grammars
        self._manager = manager
        self._requirements = requirements
        self._max_total_tokens = requirements.max_total_tokens
        self._num_arrivals = 0
        self._num_queued_tokens = 0
        self._deadlines: list[tuple[float, int, Request]] = []

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    def add(self, client_index: int, message: EngineCoreRequest, now: float) -> Request | None:
        """Queue a request. Returns None when it is refused, or known already."""
        self.clients.open(client_index)
        if (client_index, message.request_index) in self.requests:
            return None
        # Those that the next step can take do not wait for anything.
        num_queued = max(0, self.num_waiting - self.running.slots.num_free)
        refusal = self._requirements.refuse(message, num_queued, self._num_queued_tokens)
        if refusal is not None:
            reason, text = refusal
            finished = FinishedRequest(message.request_index, reason, message=text)
            self.clients.finish(client_index, finished)
            return None
        request = Request(client_index, message, self._num_arrivals, now)
        self._num_arrivals += 1
        self._num_queued_tokens += request.num_tokens
        self.requests[request.key] = request
        self.clients.event(request, EventKind.QUEUED, now)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
        if self.grammars.start(request):
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
        else:
            request.status = RequestStatus.WAITING
            self.queue.restore(request)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed before they were given anything to compute."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, request = heapq.heappop(self._deadlines)
            if request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_GRAMMAR):
                self.finish(
                    request,
                    FinishReason.EXPIRED,
                    message=f"the request waited {now - request.queued_at:.3f} s in the queue, past "
                    f"its deadline after {deadline - request.queued_at:.3f} s",
                )

    def start(
        self,
        request: Request,
        tables: tuple[list[int], ...],
        prefix: CachedPrefix,
        granted: int,
        now: float,
    ) -> NewRequestData:
        """Give the first request of the queue a slot, its blocks and its first tokens to compute."""
        self.queue.pop()
        num_tokens = request.num_tokens
        num_cached = prefix.num_blocks * self._manager.block_size
        num_computed = num_cached + granted
        output_token_ids = request.output_token_ids
        self._num_queued_tokens -= num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            if self._manager.reads_cache_for(request):
                self.stats.prefix_cache_queries += num_tokens
                self.stats.prefix_cache_hits += num_cached
        max_output = self._max_total_tokens - request.num_prompt_tokens
        if request.params.max_tokens is not None:
            max_output = min(max_output, request.params.max_tokens)
        self.running.append(request, num_computed, max_output)
        self._manager.assign(request, tables, prefix, num_computed)
        self.queue.entering(request, num_cached)
        request.status = RequestStatus.RUNNING
        self.clients.event(request, EventKind.SCHEDULED, now)
        return NewRequestData(
            slot=request.slot,
            request_id=request.key,
            token_ids=request.prompt_token_ids + output_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_cached,
            block_ids=tuple([array("i", table).tobytes() for table in tables]),
            sampling_params=request.params,
            eos_token_ids=request.eos_token_ids,
        )

    def preempt(self, slot: int, now: float) -> None:
        """Take everything from a running request but its tokens, and let it wait in its old place."""
        request = self.running[slot]
        output_token_ids = self.running.slots.output_token_ids(slot)
        request.output_token_ids = output_token_ids.tobytes()
        request.num_tokens = request.num_prompt_tokens + len(output_token_ids)
        self._vacate(request, is_preempted=True)
        request.status = RequestStatus.PREEMPTED
        request.prompt_logprobs = []
        self._num_queued_tokens += request.num_tokens
        self.queue.restore(request)
        self.stats.num_preemptions += 1
        self.clients.event(request, EventKind.PREEMPTED, now)

    def fail(self, request: Request, message: str) -> None:
        """End a request whose computation went wrong."""
        if request.status is RequestStatus.RUNNING:
            self._manager.distrust(request)
            self.finish(request, FinishReason.ERROR, message=message)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | None = None,
        message: str = "",
    ) -> None:
        """End a live request."""
        del self.requests[request.key]
        was = request.status
        request.status = RequestStatus.finished(reason)
        request.is_finished = True
        if was is RequestStatus.RUNNING:
            self._vacate(request)
        else:
            self._num_queued_tokens -= request.num_tokens
            if was is not RequestStatus.WAITING_FOR_GRAMMAR:
                self.queue.discard(request)
        self.grammars.release(request)
        finished = FinishedRequest(request.request_index, reason, stop_reason, message)
        self.clients.finish(request.client_index, finished)

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counts since the last call."""
        stats, self.stats = self.stats, SchedulerStats()
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self._manager.pool.usage
        if self._manager.pool.lifetimes.has_news:
            lifetimes, idle_times, reuse_gaps = self._manager.pool.lifetimes.take()
            stats.block_lifetimes = float32_bytes(lifetimes)
            stats.block_idle_times = float32_bytes(idle_times)
            stats.block_reuse_gaps = float32_bytes(reuse_gaps)
        if (host := self._manager.host) is not None:
            stats.host_cache_usage = host.usage
            stats.num_blocks_copied_out, stats.num_blocks_copied_in = host.take_counts()
        return stats

    def _vacate(self, request: Request, *, is_preempted: bool = False) -> None:
        self.queue.leaving(request)
        slot, state = request.slot, self.running.slots
        num_known = request.num_prompt_tokens + int(state.num_output_tokens[slot])
        num_certain = min(int(state.num_computed_tokens[slot]), num_known)
        self._manager.free(request, num_certain, is_preempted=is_preempted)
        self.running.remove(request)
