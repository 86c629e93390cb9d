"""The scheduling policies, which decide the order of admission and which running request is preempted."""

from __future__ import annotations

import enum
import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from ....protocol.arrays import Int64Array
from ...state.request import Request
from ...state.running_requests import RunningRequests
from ...state.slots import Float64Array, SlotArray
from .tenant_backpressure import TenantBackpressure

_MIN_FINISHED = 64
"""Number by which entries of finished requests must exceed the others before they are removed."""


class WaitReason(enum.IntEnum):
    """The reason why a request is set aside, so that later requests may be admitted before it."""

    LONG_PREFILLS = 0
    """The maximum number of long prompts is already being computed in chunks."""
    LORA_SLOTS = 1
    """All LoRA slots are taken by other adapters."""
    CONNECTOR = 2
    """The KV connector has not yet reported how many tokens it can load for the request."""
    LORA_TURN = 3
    """The adapter is in use, but may take no more requests: another one has waited too long for a slot."""
    TENANT = 4
    """The tenant runs as many requests as it may."""
    LORA_LOADING = 5
    """The workers are loading the adapter, or have no free place for it."""


_MAY_JOIN = frozenset({WaitReason.LONG_PREFILLS, WaitReason.CONNECTOR})
"""Reasons to wait that are checked again in every step."""


class RequestQueue(ABC):
    """Waiting requests in the order of a policy, which also decides which running request is preempted.

    A request that finishes while it waits leaves stale entries, which are skipped when they reach the front.
    """

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self._num_waiting = 0
        self._num_blocked = 0
        """Number of requests that wait for a LoRA slot or for their tenant's limit."""
        self._num_long = 0
        self.long_prompt_tokens = 0
        """Number of tokens above which a waiting request counts as long; 0 counts none as long."""
        self._aside: tuple[dict[int, Request], ...] = tuple({} for _ in WaitReason)
        self._tenant_backpressure = TenantBackpressure()

    def __len__(self) -> int:
        return self._num_waiting

    def add_request(self, request: Request) -> None:
        """Append a new request."""
        self._num_waiting += 1
        if self.long_prompt_tokens:
            self._count_long(request, 1)
        self._insert(request)

    def requeue(self, request: Request) -> None:
        """Put a preempted or loaded request back into the queue, at the place given by its arrival."""
        self._num_waiting += 1
        if self.long_prompt_tokens:
            self._count_long(request, 1)
        self._reinsert(request)

    def pop_request(self) -> Request:
        """Remove and return the request that `peek_request` returns."""
        self._num_waiting -= 1
        request = self._remove_first()
        if self.long_prompt_tokens:
            self._count_long(request, -1)
        return request

    def _count_long(self, request: Request, change: int) -> None:
        if request.num_tokens > self.long_prompt_tokens:
            self._num_long += change

    def _count_blocked(self, request: Request, change: int) -> None:
        """Count a request that is set aside (`change` 1) or put back (-1) for a reason that lasts over steps."""
        self._num_blocked += change
        if self.long_prompt_tokens:
            self._count_long(request, -change)

    def count_joinable(self, max_long: int) -> int:
        """Return how many waiting requests the next step might admit, at most `max_long` of them long."""
        return self._num_waiting - self._num_blocked - max(self._num_long - max_long, 0)

    def set_aside(self, wait_reason: WaitReason) -> None:
        """Take the first request out of the order until it is put back. It still counts as waiting."""
        request = self._remove_first()
        if wait_reason not in _MAY_JOIN:
            self._count_blocked(request, 1)
        if wait_reason is WaitReason.TENANT:
            self._tenant_backpressure.add_request(request)
        else:
            self._aside[wait_reason][request.arrival] = request

    def put_back(self, wait_reason: WaitReason) -> None:
        """Put back every request that was set aside for this reason."""
        aside = self._aside[wait_reason]
        for request in aside.values():
            if wait_reason not in _MAY_JOIN:
                self._count_blocked(request, -1)
            self._reinsert(request)
        aside.clear()

    def find_first_aside(self, wait_reason: WaitReason, before: float) -> Request | None:
        """Return the first request that was set aside for this reason and was queued before the time `before`."""
        aside = (r for r in self._aside[wait_reason].values() if r.queued_at < before)
        return min(aside, key=lambda r: (r.rank, r.arrival), default=None)

    def put_back_tenant(self, tenant: str, count: int) -> None:
        """Put back the first `count` requests that were set aside for their tenant's limit."""
        for request in self._tenant_backpressure.pop_requests(tenant, count):
            self._count_blocked(request, -1)
            self._reinsert(request)

    def get_wait_reason(self, request: Request) -> WaitReason | None:
        """Return why a waiting request is set aside, or None if it is not."""
        if request in self._tenant_backpressure:
            return WaitReason.TENANT
        return next((o for o in WaitReason if request.arrival in self._aside[o]), None)

    def remove_request(self, request: Request) -> None:
        """Remove a waiting request that has finished."""
        self._num_waiting -= 1
        if self.long_prompt_tokens:
            self._count_long(request, -1)
        wait_reason = next(
            (o for o in WaitReason if self._aside[o].pop(request.arrival, None)), None
        )
        if wait_reason is None and self._tenant_backpressure.remove_request(request):
            wait_reason = WaitReason.TENANT
        if wait_reason is None:
            self._compact(request)
        elif wait_reason not in _MAY_JOIN:
            self._count_blocked(request, -1)

    @abstractmethod
    def peek_request(self) -> Request | None:
        """Return the next request to admit."""

    charges_for_computing = False
    """True if the order depends on the tokens that earlier requests compute in the same step."""

    def record_scheduled(  # noqa: B027
        self, requests: Sequence[Request], num_cached_tokens: Sequence[int]
    ) -> None:
        """Record that requests got slots. Their first `num_cached_tokens` tokens were found in the cache."""

    def record_unscheduled(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """Record that requests are about to lose their slots. Call this before their blocks are freed."""

    def choose_victim(self, slots: SlotArray) -> int:
        """Return the slot to preempt when blocks run out; by default the latest admitted."""
        return int(slots[-1])

    def find_preemptible(self, request: Request) -> list[int]:
        """Return the running slots that may be preempted for a waiting request, in order of preemption."""
        return []

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    @abstractmethod
    def _reinsert(self, request: Request) -> None: ...

    @abstractmethod
    def _remove_first(self) -> Request: ...

    @abstractmethod
    def _compact(self, request: Request) -> None:
        """Remove the entries of finished requests if there are many."""


class FCFSQueue(RequestQueue):
    """The `fcfs` policy: first come, first served. Requests that are put back go into a heap, ordered by arrival."""

    def __init__(self, running: RunningRequests) -> None:
        super().__init__(running)
        self._arrivals: deque[Request] = deque()
        self._restored: list[tuple[int, Request]] = []

    def peek_request(self) -> Request | None:
        """Return the earliest arrival."""
        arrivals, restored = self._arrivals, self._restored
        while arrivals and arrivals[0].is_finished:
            arrivals.popleft()
        while restored and restored[0][1].is_finished:
            heapq.heappop(restored)
        if restored and self._is_restored_next():
            return restored[0][1]
        return arrivals[0] if arrivals else None

    def _insert(self, request: Request) -> None:
        self._arrivals.append(request)

    def _reinsert(self, request: Request) -> None:
        heapq.heappush(self._restored, (request.arrival, request))

    def _remove_first(self) -> Request:
        if self._restored and self._is_restored_next():
            return heapq.heappop(self._restored)[1]
        return self._arrivals.popleft()

    def _is_restored_next(self) -> bool:
        if not self._restored:
            return False
        return not self._arrivals or self._restored[0][0] < self._arrivals[0].arrival

    def _compact(self, request: Request) -> None:
        if len(self._arrivals) + len(self._restored) > 2 * self._num_waiting + _MIN_FINISHED:
            self._arrivals = deque(r for r in self._arrivals if not r.is_finished)
            self._restored = [entry for entry in self._restored if not entry[1].is_finished]
            heapq.heapify(self._restored)


class RankedQueue(RequestQueue):
    """A queue in which the smallest (rank, arrival) is admitted first, and the largest is preempted first.

    If `preempts` is true, a waiting request may preempt running ones of strictly larger rank.
    """

    def __init__(self, running: RunningRequests, *, preempts: bool = False) -> None:
        super().__init__(running)
        self._preempts = preempts
        self._heap: list[tuple[float, int, Request]] = []
        max_num_seqs = len(running.slots.requests)
        self._ranks: Float64Array = np.zeros(max_num_seqs, np.float64)
        self._arrivals: Int64Array = np.zeros(max_num_seqs, np.int64)

    @abstractmethod
    def compute_rank(self, request: Request) -> float:
        """Return the sort key of a request; smaller ones are admitted first."""

    def peek_request(self) -> Request | None:
        """Return the waiting request with the smallest rank."""
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def record_scheduled(
        self, requests: Sequence[Request], num_cached_tokens: Sequence[int]
    ) -> None:
        """Record the ranks of requests that got slots."""
        for request in requests:
            self._ranks[request.slot] = request.rank
            self._arrivals[request.slot] = request.arrival

    def choose_victim(self, slots: SlotArray) -> int:
        """Return the slot with the largest rank."""
        return self._worst_first(slots)[0]

    def find_preemptible(self, request: Request) -> list[int]:
        """Return the slots with a larger rank than the request, largest first."""
        if not self._preempts:
            return []
        order = self._running.order
        return self._worst_first(order[self._ranks[order] > request.rank])

    def _worst_first(self, slots: SlotArray) -> list[int]:
        ascending: list[int] = slots[
            np.lexsort((self._arrivals[slots], self._ranks[slots]))
        ].tolist()
        return ascending[::-1]

    def _insert(self, request: Request) -> None:
        request.rank = self.compute_rank(request)
        request.is_untouched = request.is_untouched and not request.rank
        heapq.heappush(self._heap, (request.rank, request.arrival, request))

    def _reinsert(self, request: Request) -> None:
        self._insert(request)

    def _remove_first(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def _compact(self, request: Request) -> None:
        if len(self._heap) > 2 * self._num_waiting + _MIN_FINISHED:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)


class PriorityQueue(RankedQueue):
    """The `priority` policy: smaller priority values are admitted first."""

    def compute_rank(self, request: Request) -> float:
        """Return the priority."""
        return float(request.priority)


class DeadlineQueue(RankedQueue):
    """The `deadline` policy: the earliest deadline is admitted first, and requests without a deadline last."""

    def compute_rank(self, request: Request) -> float:
        """Return the deadline, or infinity without one."""
        return request.deadline or float("inf")
