"""Requests whose tenants run as many as they may."""

from __future__ import annotations

from bisect import bisect_left, insort

from .request import Request


class HeldRequests:
    """Those of each tenant in the order of the policy."""

    def __init__(self) -> None:
        self._of_tenant: dict[str, list[tuple[float, int, Request]]] = {}

    def add(self, request: Request) -> None:
        insort(self._of_tenant.setdefault(request.tenant, []), _entry(request))

    def take(self, tenant: str, count: int) -> list[Request]:
        """Remove the first `count` of the tenant, if there are so many."""
        held = self._of_tenant.get(tenant)
        if held is None:
            return []
        taken = [request for _, _, request in held[:count]]
        del held[:count]
        if not held:
            del self._of_tenant[tenant]
        return taken

    def discard(self, request: Request) -> bool:
        """Whether the request was held; it is no more."""
        held = self._of_tenant.get(request.tenant, [])
        position = bisect_left(held, _entry(request))
        if position == len(held) or held[position][2] is not request:
            return False
        del held[position]
        if not held:
            del self._of_tenant[request.tenant]
        return True


def _entry(request: Request) -> tuple[float, int, Request]:
    return request.rank, request.arrival, request
