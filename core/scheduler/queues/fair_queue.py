"""The `fair` policy: token-weighted fair queueing between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ....protocol.arrays import Int64Array
from ...state.request import Request
from ...state.running_requests import RunningRequests
from .request_queue import FCFSQueue, RequestQueue, WaitReason

_MIN_STALE: Final = 64
"""A heap is rebuilt when it has more entries than this plus twice the number of tenants."""

_MAX_TENANTS: Final = 4096
"""Maximum number of tracked tenants. Clients choose the names, so idle tenants beyond this number are removed."""

_UNCONTENDED: Final = (WaitReason.CONNECTOR, WaitReason.TENANT)
"""Reasons to wait that do not come from the use of shared capacity by other tenants."""


class Tenant:
    """A tenant's queue. `service` is the number of charged tokens divided by the tenant's weight."""

    __slots__ = ("index", "name", "num_running", "service", "waiting", "weight")

    def __init__(self, index: int, name: str, weight: float, waiting: FCFSQueue) -> None:
        self.index = index
        self.name = name
        self.weight = weight
        self.service = 0.0
        self.waiting = waiting
        self.num_running = 0

    @property
    def is_active(self) -> bool:
        """True if the tenant has running or waiting requests."""
        return bool(self.num_running or self.waiting)


class FairQueue(RequestQueue):
    """Admits the tenant with the least service first; within a tenant, first come, first served.

    Tenants are charged for computed tokens, both prompt and output. Cached tokens are free, and so are tokens that are
    computed again after a preemption or a rejected draft. Tokens are charged only while some tenant waits for capacity
    that others use. Once no tenant waits, all become equal again.

    The level is the service of the least served waiting tenant. A tenant whose service is below the level is raised to
    it, so idle time earns no credit. Service above the level is kept. If two tenants are equal, the one that
    waited longer is first.
    """

    def __init__(
        self, running: RunningRequests, *, max_num_seqs: int, weights: Mapping[str, float]
    ) -> None:
        super().__init__(running)
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}
        self._by_index: list[Tenant] = []
        self._unused_indices: list[int] = []
        # Heaps of (service, serial number, tenant index); an entry is stale when the tenant's service has changed.
        self._waiting: list[tuple[float, int, int]] = []
        self._idle: list[tuple[float, int, int]] = []
        self._num_pushed = 0
        self._level = 0.0
        self._max_service = 0.0
        """The largest `service` of any tenant so far, in tokens per weight."""
        self._tenant_of: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_charged: Int64Array = np.zeros(max_num_seqs, np.int64)

    def peek_request(self) -> Request | None:
        """Return the next request of the least served tenant."""
        tenant = self._least_served()
        if tenant is None:
            return None
        self._charge_running()
        tenant = self._least_served()
        return tenant.waiting.peek_request() if tenant else None

    charges_for_computing = True

    def record_scheduled(
        self, requests: Sequence[Request], num_cached_tokens: Sequence[int]
    ) -> None:
        """Start to charge requests, which got slots, for the tokens that they compute."""
        for request, num_cached in zip(requests, num_cached_tokens, strict=True):
            tenant = self._tenants[request.tenant]
            tenant.num_running += 1
            self._tenant_of[request.slot] = tenant.index
            self._num_charged[request.slot] = max(num_cached, request.num_charged_tokens)

    def record_unscheduled(self, requests: Sequence[Request]) -> None:
        """Charge requests for the tokens that they computed, before they lose their slots."""
        is_contended = self._is_contended()
        for request in requests:
            slot = request.slot
            tenant = self._tenants[request.tenant]
            charged = int(self._num_charged[slot])
            computed = max(charged, int(self._running.slots.num_computed_tokens[slot]))
            if is_contended:
                self._charge(tenant, computed - charged)
            self._num_charged[slot] = request.num_charged_tokens = computed
            tenant.num_running -= 1
            self._record_idle(tenant)

    def _insert(self, request: Request) -> None:
        self._activate(request.tenant).waiting.add_request(request)

    def _reinsert(self, request: Request) -> None:
        self._activate(request.tenant).waiting.requeue(request)

    def _remove_first(self) -> Request:
        tenant = self._least_served()
        assert tenant is not None
        return tenant.waiting.pop_request()

    def _is_contended(self) -> bool:
        """Return whether a request waits for capacity that other tenants use."""
        return self._least_served() is not None or any(
            aside and wait_reason not in _UNCONTENDED
            for wait_reason, aside in zip(WaitReason, self._aside, strict=True)
        )

    def _activate(self, name: str) -> Tenant:
        """Return the tenant, created and added to the waiting tenants if necessary."""
        if not self._is_contended():
            self._level_tenants()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._new_tenant(name)
        if not tenant.waiting:
            self._charge_running()
            tenant.service = max(tenant.service, self._level)
            self._push(self._waiting, tenant)
        return tenant

    def _level_tenants(self) -> None:
        """Make all tenants equal. Tokens that were computed while no tenant waited are not charged."""
        slots = self._running.order
        computed = self._running.slots.num_computed_tokens[slots]
        self._num_charged[slots] = np.maximum(self._num_charged[slots], computed)
        self._level = self._max_service
        self._remove_level_tenants()

    def _new_tenant(self, name: str) -> Tenant:
        waiting = FCFSQueue(self._running)
        weight = self._weights.get(name, 1.0)
        if self._unused_indices:
            tenant = Tenant(self._unused_indices.pop(), name, weight, waiting)
            self._by_index[tenant.index] = tenant
        else:
            tenant = Tenant(len(self._by_index), name, weight, waiting)
            self._by_index.append(tenant)
        self._tenants[name] = tenant
        return tenant

    def _charge_running(self) -> None:
        """Charge the tokens that running requests have computed since the last call."""
        slots = self._running.order
        charged = self._num_charged[slots]
        computed = np.maximum(charged, self._running.slots.num_computed_tokens[slots])
        tokens = computed - charged
        if tokens.any():
            self._num_charged[slots] = computed
            owed = np.bincount(self._tenant_of[slots], tokens)
            for index in owed.nonzero()[0].tolist():
                self._charge(self._by_index[index], int(owed[index]))

    def _charge(self, tenant: Tenant, tokens: int) -> None:
        if not tokens:
            return
        tenant.service = max(tenant.service, self._level) + tokens / tenant.weight
        self._max_service = max(self._max_service, tenant.service)
        if tenant.waiting:
            self._push(self._waiting, tenant)

    def _push(self, heap: list[tuple[float, int, int]], tenant: Tenant) -> None:
        self._num_pushed += 1
        heapq.heappush(heap, (tenant.service, self._num_pushed, tenant.index))
        if len(heap) > 2 * len(self._by_index) + _MIN_STALE:
            # Stale entries are otherwise removed only when they reach the front, which may never happen.
            first: dict[int, tuple[float, int, int]] = {}
            for entry in sorted(heap):
                if self._by_index[entry[2]].service == entry[0]:
                    first.setdefault(entry[2], entry)
            heap[:] = sorted(first.values())

    def _least_served(self) -> Tenant | None:
        """Return the waiting tenant with the least service, after setting the level to that service."""
        while self._waiting:
            service, _, index = self._waiting[0]
            tenant = self._by_index[index]
            if tenant.waiting and tenant.service == service:
                if service > self._level:
                    self._level = service
                return tenant
            heapq.heappop(self._waiting)
        return None

    def _record_idle(self, tenant: Tenant) -> None:
        """Keep the service of an idle tenant if it is above the level; else remove the tenant."""
        if tenant.is_active:
            return
        self._push(self._idle, tenant)
        self._least_served()
        self._remove_level_tenants()
        while len(self._tenants) > _MAX_TENANTS and self._idle:
            self._remove_first_idle()

    def _remove_level_tenants(self) -> None:
        """Remove the idle tenants whose service is not above the level."""
        while self._idle and self._idle[0][0] <= self._level:
            self._remove_first_idle()

    def _remove_first_idle(self) -> None:
        """Remove the least served idle tenant, unless its heap entry is stale."""
        service, _, index = heapq.heappop(self._idle)
        tenant = self._by_index[index]
        is_known = self._tenants.get(tenant.name) is tenant
        if is_known and not tenant.is_active and tenant.service == service:
            del self._tenants[tenant.name]
            self._unused_indices.append(index)

    def remove_request(self, request: Request) -> None:
        """Remove a waiting request that has finished."""
        super().remove_request(request)
        # The tenant of a request that had been set aside may have been removed.
        tenant = self._tenants.get(request.tenant)
        if tenant is not None:
            self._record_idle(tenant)

    def _compact(self, request: Request) -> None:
        self._tenants[request.tenant].waiting.remove_request(request)
