"""Count waiting requests per tenant, and estimate when they will be admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_NUM_REMEMBERED = 64


class AdmissionRate:
    """The average time between recent admissions in seconds, not counting times when no request waited."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._last = 0.0

    def record_admissions(self, queued_at: Sequence[float], now: float) -> None:
        """Record that requests were admitted together; `queued_at` has the times at which they were queued."""
        self._waits.append(now - max(queued_at[0], self._last))
        self._waits.extend([0.0] * (len(queued_at) - 1))
        self._last = now

    def estimate_seconds(self, num_requests: int) -> float:
        """Return how many seconds this number of admissions will take; 0.0 before the first admission."""
        if not self._waits:
            return 0.0
        return num_requests * sum(self._waits) / len(self._waits)


class Tenant:
    """The numbers of a tenant's unfinished and running requests."""

    __slots__ = ("num_live", "num_running", "rate")

    def __init__(self) -> None:
        self.num_live = 0
        self.num_running = 0
        self.rate = AdmissionRate()


class TenantLimits:
    """Limits how many requests of one tenant may run and wait. 0 means unlimited."""

    def __init__(self, max_num_seqs: int, max_num_queued_reqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._tenants: dict[str, Tenant] = {}
        self.max_num_queued_reqs = max_num_queued_reqs
        self._changed: dict[str, None] = {}

    @property
    def num_tenants(self) -> int:
        """Number of tenants with unfinished requests."""
        return len(self._tenants)

    def may_run(self, name: str) -> bool:
        """Return whether another request of a tenant may be admitted. The tenant must have an unfinished request."""
        return not self._max_num_seqs or self._tenants[name].num_running < self._max_num_seqs

    def count_queued(self, name: str, num_queued_reqs: int) -> int:
        """Return how many requests of the tenant are queued; `num_queued_reqs` is the number over all tenants."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return 0
        num_queued = min(tenant.num_live - tenant.num_running, num_queued_reqs)
        if self._max_num_seqs:
            num_queued = max(num_queued, tenant.num_live - self._max_num_seqs)
        return num_queued

    def estimate_seconds(self, name: str, num_requests: int) -> float:
        """Return how many seconds this number of admissions of the tenant will take."""
        tenant = self._tenants.get(name)
        return tenant.rate.estimate_seconds(num_requests) if tenant else 0.0

    def record_arrival(self, name: str) -> None:
        """Count a new request."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant()
        tenant.num_live += 1

    def record_start(self, name: str, queued_at: float, now: float) -> None:
        """Count a request that was admitted."""
        tenant = self._tenants[name]
        tenant.num_running += 1
        tenant.rate.record_admissions([queued_at], now)

    def record_stop(self, name: str) -> None:
        """Count a running request that finished or was preempted."""
        self._tenants[name].num_running -= 1
        self._changed[name] = None

    def record_end(self, name: str) -> None:
        """Count a request that finished."""
        tenant = self._tenants[name]
        tenant.num_live -= 1
        self._changed[name] = None
        if not tenant.num_live:
            del self._tenants[name]

    def take_openings(self) -> list[tuple[str, int]]:
        """Return (tenant, number of requests that may start) for tenants with free places since the last call."""
        if not self._changed:
            return []
        names, self._changed = self._changed, {}
        if not self._max_num_seqs:
            return []
        return [
            (name, self._max_num_seqs - self._tenants[name].num_running)
            for name in names
            if name in self._tenants
        ]
