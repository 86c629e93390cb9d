"""How many requests wait for admission, and how long that will take."""

from __future__ import annotations

from collections import deque

_NUM_REMEMBERED = 64


class AdmissionRate:
    """The pace of the last admissions. Time in which no request waited is left out."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._last = 0.0

    def admitted(self, queued_at: float, now: float) -> None:
        """A request that came at `queued_at` is admitted."""
        self._waits.append(now - (queued_at if queued_at > self._last else self._last))
        self._last = now

    def seconds_for(self, num_requests: int) -> float:
        """How long so many more admissions will take; 0.0 as long as nothing is known."""
        if not self._waits:
            return 0.0
        return num_requests * sum(self._waits) / len(self._waits)


class Tenant:
    """Requests of one tenant that have not ended."""

    __slots__ = ("num_live", "num_running", "rate")

    def __init__(self) -> None:
        self.num_live = 0
        self.num_running = 0
        self.rate = AdmissionRate()


class TenantLimits:
    """How many requests of one tenant may run and wait. A limit of 0 is none."""

    def __init__(self, max_num_seqs: int, max_num_queued_reqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._tenants: dict[str, Tenant] = {}
        self.max_num_queued_reqs = max_num_queued_reqs
        self._changed: dict[str, None] = {}

    def may_run(self, name: str) -> bool:
        """Whether one more request of the tenant, which has one at least, may be admitted."""
        return not self._max_num_seqs or self._tenants[name].num_running < self._max_num_seqs

    def num_queued(self, name: str, num_queued_reqs: int) -> int:
        """The requests of the tenant for which there is no slot, `num_queued_reqs` being those of all."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return 0
        num_queued = min(tenant.num_live - tenant.num_running, num_queued_reqs)
        if self._max_num_seqs:
            num_queued = max(num_queued, tenant.num_live - self._max_num_seqs)
        return num_queued

    def seconds_for(self, name: str, num_requests: int) -> float:
        """How long so many more admissions of the tenant's requests will take."""
        tenant = self._tenants.get(name)
        return tenant.rate.seconds_for(num_requests) if tenant else 0.0

    def arrived(self, name: str) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant()
        tenant.num_live += 1

    def started(self, name: str, queued_at: float, now: float) -> None:
        tenant = self._tenants[name]
        tenant.num_running += 1
        tenant.rate.admitted(queued_at, now)

    def stopped(self, name: str) -> None:
        """A running request has ended or is preempted."""
        self._tenants[name].num_running -= 1
        self._changed[name] = None

    def ended(self, name: str) -> None:
        tenant = self._tenants[name]
        tenant.num_live -= 1
        self._changed[name] = None
        if not tenant.num_live:
            del self._tenants[name]

    def take_openings(self) -> list[tuple[str, int]]:
        """(tenant, how many more it may run) of tenants with a request that stopped or ended since the last call."""
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
