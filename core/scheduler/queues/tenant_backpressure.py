"""Hold back waiting requests whose tenants already run as many requests as they may."""

from __future__ import annotations

from bisect import bisect_left, insort

from ...state.request import Request


class TenantBackpressure:
    """The waiting requests that are held back, per tenant in the order of the policy."""

    def __init__(self) -> None:
        self._of_tenant: dict[str, list[tuple[float, int, Request]]] = {}

    def add_request(self, request: Request) -> None:
        """Hold back a request."""
        insort(self._of_tenant.setdefault(request.tenant, []), _entry(request))

    def __contains__(self, request: Request) -> bool:
        return self._position(request) is not None

    def pop_requests(self, tenant: str, count: int) -> list[Request]:
        """Remove and return the first `count` requests of a tenant, or all if there are fewer."""
        aside = self._of_tenant.get(tenant)
        if aside is None:
            return []
        taken = [request for _, _, request in aside[:count]]
        del aside[:count]
        if not aside:
            del self._of_tenant[tenant]
        return taken

    def remove_request(self, request: Request) -> bool:
        """Remove a request. Return whether it was held."""
        position = self._position(request)
        if position is None:
            return False
        aside = self._of_tenant[request.tenant]
        del aside[position]
        if not aside:
            del self._of_tenant[request.tenant]
        return True

    def _position(self, request: Request) -> int | None:
        aside = self._of_tenant.get(request.tenant, [])
        position = bisect_left(aside, _entry(request))
        is_there = position < len(aside) and aside[position][2] is request
        return position if is_there else None


def _entry(request: Request) -> tuple[float, int, Request]:
    return request.rank, request.arrival, request
