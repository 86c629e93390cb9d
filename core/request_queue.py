"""Requests that wait for admission, in the order of a policy."""

from __future__ import annotations

import enum
import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..protocol.arrays import Int64Array
from .aside_by_tenant import AsideByTenant
from .request import Request
from .running_requests import RunningRequests
from .slots import Float64Array, SlotArray

_MIN_LEFT = 64
"""Entries of requests that ended while they waited are swept out when they outnumber the others by this."""


class Obstacle(enum.IntEnum):
    """Why a request is set aside, so that those behind it pass it."""

    LONG_PREFILLS = 0
    LORA_SLOTS = 1
    CONNECTOR = 2
    LORA_TURN = 3
    TENANT = 4


class RequestQueue(ABC):
    """The order of admission, and against it that of preemption.

    Requests may leave anywhere in the queue by finishing; they are dropped when they come to the front.
    """

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self._num_waiting = 0
        self._aside: tuple[dict[int, Request], ...] = tuple({} for _ in Obstacle)
        self._aside_by_tenant = AsideByTenant()

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, request: Request) -> None:
        """Append an arrival."""
        self._num_waiting += 1
        self._insert(request)

    def restore(self, request: Request) -> None:
        """Put a request back in the place that its arrival gives it."""
        self._num_waiting += 1
        self._reinsert(request)

    def pop(self) -> Request:
        """Remove the request that `peek` returns."""
        self._num_waiting -= 1
        return self._remove_first()

    def set_aside(self, obstacle: Obstacle) -> None:
        """Take the first request out of the order until it is put back; it still waits."""
        request = self._remove_first()
        if obstacle is Obstacle.TENANT:
            self._aside_by_tenant.add(request)
        else:
            self._aside[obstacle][request.arrival] = request

    def put_back(self, obstacle: Obstacle) -> None:
        """Put every request that was set aside for this reason back in its place."""
        aside = self._aside[obstacle]
        for request in aside.values():
            self._reinsert(request)
        aside.clear()

    def first_aside(self, obstacle: Obstacle, before: float) -> Request | None:
        """Of the requests set aside for this reason, the first in the order that came before a time."""
        aside = (r for r in self._aside[obstacle].values() if r.queued_at < before)
        return min(aside, key=lambda r: (r.rank, r.arrival), default=None)

    def put_back_of_tenant(self, tenant: str, count: int) -> None:
        """Put back the first `count` requests that were set aside because this tenant ran as many as it may."""
        for request in self._aside_by_tenant.take(tenant, count):
            self._reinsert(request)

    def obstacle_of(self, request: Request) -> Obstacle | None:
        """Why a waiting request is set aside, if it is."""
        if request in self._aside_by_tenant:
            return Obstacle.TENANT
        return next((o for o in Obstacle if request.arrival in self._aside[o]), None)

    def discard(self, request: Request) -> None:
        """A request in the queue has finished."""
        self._num_waiting -= 1
        is_aside = any(aside.pop(request.arrival, None) for aside in self._aside)
        if not is_aside and not self._aside_by_tenant.discard(request):
            self._leave(request)

    @abstractmethod
    def peek(self) -> Request | None:
        """The next request to admit."""

    charges_for_computing = False
    """Whether the order depends on what earlier requests get of the same step."""

    def entering(self, requests: Sequence[Request], num_cached_tokens: Sequence[int]) -> None:  # noqa: B027
        """Requests got slots; the first `num_cached_tokens` tokens of each need not be computed."""

    def leaving(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """Requests are about to lose their slots."""

    def victim(self, slots: SlotArray) -> int:
        """Which of these running requests to preempt when blocks are lacking."""
        return int(slots[-1])

    def displaceable(self, request: Request) -> list[int]:
        """The slots of requests that may be preempted for a waiting one, in the order of preemption."""
        return []

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    @abstractmethod
    def _reinsert(self, request: Request) -> None: ...

    @abstractmethod
    def _remove_first(self) -> Request: ...

    @abstractmethod
    def _leave(self, request: Request) -> None:
        """Account for a finished request, which is still among the entries."""


class FCFSQueue(RequestQueue):
    """First come, first served. Requests that come back (preempted, set aside) are kept apart, by arrival."""

    def __init__(self, running: RunningRequests) -> None:
        super().__init__(running)
        self._arrivals: deque[Request] = deque()
        self._restored: list[tuple[int, Request]] = []

    def peek(self) -> Request | None:
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

    def _leave(self, request: Request) -> None:
        if len(self._arrivals) + len(self._restored) > 2 * self._num_waiting + _MIN_LEFT:
            self._arrivals = deque(r for r in self._arrivals if not r.is_finished)
            self._restored = [entry for entry in self._restored if not entry[1].is_finished]
            heapq.heapify(self._restored)


class RankedQueue(RequestQueue):
    """Smallest (rank, arrival) first; the largest is the first to be preempted.

    A waiting request may displace running ones of strictly larger rank if `preempts`.
    """

    def __init__(self, running: RunningRequests, *, preempts: bool = False) -> None:
        super().__init__(running)
        self._preempts = preempts
        self._heap: list[tuple[float, int, Request]] = []
        max_num_seqs = len(running.slots.requests)
        self._ranks: Float64Array = np.zeros(max_num_seqs, np.float64)
        self._arrivals: Int64Array = np.zeros(max_num_seqs, np.int64)

    @abstractmethod
    def rank(self, request: Request) -> float: ...

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def entering(self, requests: Sequence[Request], num_cached_tokens: Sequence[int]) -> None:
        for request in requests:
            self._ranks[request.slot] = request.rank
            self._arrivals[request.slot] = request.arrival

    def victim(self, slots: SlotArray) -> int:
        return self._worst_first(slots)[0]

    def displaceable(self, request: Request) -> list[int]:
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
        request.rank = self.rank(request)
        heapq.heappush(self._heap, (request.rank, request.arrival, request))

    def _reinsert(self, request: Request) -> None:
        self._insert(request)

    def _remove_first(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def _leave(self, request: Request) -> None:
        if len(self._heap) > 2 * self._num_waiting + _MIN_LEFT:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)


class PriorityQueue(RankedQueue):
    """Smaller priority values first."""

    def rank(self, request: Request) -> float:
        return float(request.priority)


class DeadlineQueue(RankedQueue):
    """Least slack first: all requests see the same clock, so that is the earliest deadline."""

    def rank(self, request: Request) -> float:
        return request.deadline or float("inf")
