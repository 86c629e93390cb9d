"""Token-weighted fair queueing between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ..protocol.arrays import Int64Array
from .request import Request
from .request_queue import FCFSQueue, RequestQueue
from .running_requests import RunningRequests

_MIN_STALE: Final = 64
"""Stale entries of a heap are removed when it has so many more than twice as many as there are tenants."""


class Tenant:
    """`service` is the number of computed tokens divided by the tenant's weight."""

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
        return bool(self.num_running or self.waiting)


class FairQueue(RequestQueue):
    """Admits for the tenant that has received least, and within a tenant first come, first served.

    Computed tokens are what counts, prompt or output; cached ones cost nothing, and neither does computing
    a token again, after a preemption or a rejected draft. A tenant that comes back from
    idleness starts level with the least served active one, so that nothing is saved up by waiting; what it
    received above that level is remembered.
    """

    def __init__(
        self, running: RunningRequests, *, max_num_seqs: int, weights: Mapping[str, float]
    ) -> None:
        super().__init__(running)
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}
        self._by_index: list[Tenant] = []
        self._unused_indices: list[int] = []
        # Heaps of (service, tenant index); an entry is stale when the tenant's service has changed.
        self._active: list[tuple[float, int]] = []
        self._idle: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._level = 0.0
        self._tenant_of: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_charged: Int64Array = np.zeros(max_num_seqs, np.int64)

    def peek(self) -> Request | None:
        self._charge_running()
        tenant = self._least_served()
        return tenant.waiting.peek() if tenant else None

    charges_for_computing = True

    def entering(self, requests: Sequence[Request], num_cached_tokens: Sequence[int]) -> None:
        for request, num_cached in zip(requests, num_cached_tokens, strict=True):
            tenant = self._tenants[request.tenant]
            tenant.num_running += 1
            self._tenant_of[request.slot] = tenant.index
            self._num_charged[request.slot] = max(num_cached, request.num_charged_tokens)

    def leaving(self, requests: Sequence[Request]) -> None:
        for request in requests:
            slot = request.slot
            tenant = self._tenants[request.tenant]
            charged = int(self._num_charged[slot])
            computed = max(charged, int(self._running.slots.num_computed_tokens[slot]))
            self._charge(tenant, computed - charged)
            self._num_charged[slot] = request.num_charged_tokens = computed
            tenant.num_running -= 1
            self._note_idle(tenant)

    def _insert(self, request: Request) -> None:
        self._wake(request.tenant).waiting.add(request)

    def _reinsert(self, request: Request) -> None:
        self._wake(request.tenant).waiting.restore(request)

    def _remove_first(self) -> Request:
        tenant = self._least_served()
        assert tenant is not None
        return tenant.waiting.pop()

    def _wake(self, name: str) -> Tenant:
        """The tenant, ready to wait for service."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._new_tenant(name)
        if not tenant.is_active:
            self._charge_running()
            tenant.service = max(tenant.service, self._find_level())
            self._push(self._active, tenant)
        self._push(self._waiting, tenant)
        return tenant

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
        """Charge what the running requests have received since the last time."""
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
        tenant.service += tokens / tenant.weight
        self._push(self._active, tenant)
        if tenant.waiting:
            self._push(self._waiting, tenant)

    def _push(self, heap: list[tuple[float, int]], tenant: Tenant) -> None:
        heapq.heappush(heap, (tenant.service, tenant.index))
        if len(heap) > 2 * len(self._by_index) + _MIN_STALE:
            # Stale entries are popped at the front, which they may never reach while a tenant is never idle.
            heap[:] = sorted(
                {entry for entry in heap if self._by_index[entry[1]].service == entry[0]}
            )

    def _least_served(self) -> Tenant | None:
        while self._waiting:
            service, index = self._waiting[0]
            tenant = self._by_index[index]
            if tenant.waiting and tenant.service == service:
                return tenant
            heapq.heappop(self._waiting)
        return None

    def _find_level(self) -> float:
        """The service of the least served active tenant; it never falls."""
        while self._active:
            service, index = self._active[0]
            tenant = self._by_index[index]
            if tenant.is_active and tenant.service == service:
                self._level = max(self._level, service)
                break
            heapq.heappop(self._active)
        return self._level

    def _note_idle(self, tenant: Tenant) -> None:
        """Remember an idle tenant only until the others have caught up with it."""
        if tenant.is_active:
            return
        self._push(self._idle, tenant)
        level = self._find_level()
        while self._idle and self._idle[0][0] <= level:
            service, index = heapq.heappop(self._idle)
            forgotten = self._by_index[index]
            is_known = self._tenants.get(forgotten.name) is forgotten
            if is_known and not forgotten.is_active and forgotten.service == service:
                del self._tenants[forgotten.name]
                self._unused_indices.append(index)

    def discard(self, request: Request) -> None:
        super().discard(request)
        # The tenant of a request that was set aside may have been forgotten.
        tenant = self._tenants.get(request.tenant)
        if tenant is not None:
            self._note_idle(tenant)

    def _leave(self, request: Request) -> None:
        self._tenants[request.tenant].waiting.discard(request)
