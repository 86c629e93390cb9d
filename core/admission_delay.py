"""Holding back admission so that prompts are computed together."""

from __future__ import annotations

from collections import deque

from .request import Request, RequestStatus


class AdmissionDelay:
    """No request is admitted before the oldest waiting one has waited `factor` times the last prefill's latency.

    A request that was preempted has waited long enough.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._arrivals: deque[Request] = deque()
        self._last_prefill_s = 0.0

    def arrived(self, request: Request) -> None:
        self._arrivals.append(request)

    def prefilled(self, latency_s: float) -> None:
        """A step with a prompt in it took so long."""
        self._last_prefill_s = latency_s

    def holds_back(self, next_request: Request, now: float) -> bool:
        """Whether the next request to admit must wait on."""
        if next_request.status is RequestStatus.PREEMPTED:
            return False
        arrivals = self._arrivals
        while arrivals and arrivals[0].status is not RequestStatus.WAITING:
            arrivals.popleft()
        oldest = arrivals[0] if arrivals else next_request
        return now - oldest.queued_at <= self._factor * self._last_prefill_s
