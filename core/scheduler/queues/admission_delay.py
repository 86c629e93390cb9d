"""Delay admission so that prompts are computed together (`--scheduler-delay-factor`)."""

from __future__ import annotations

from collections import deque

from ...state.request import Request, RequestStatus


class AdmissionDelay:
    """Delays admission until the oldest waiting request has waited `factor` times the duration of the last prefill.

    Preempted requests are admitted without this delay.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._arrivals: deque[Request] = deque()
        self._last_prefill_s = 0.0

    def add_request(self, request: Request) -> None:
        """Record when a request was queued."""
        self._arrivals.append(request)

    def record_prefill(self, latency_s: float) -> None:
        """Record the duration of a step that computed a prompt, in seconds."""
        self._last_prefill_s = latency_s

    def must_wait(self, next_request: Request, now: float) -> bool:
        """Return whether `next_request`, the first in the queue, must wait."""
        if next_request.status is RequestStatus.PREEMPTED:
            return False
        arrivals = self._arrivals
        while arrivals and arrivals[0].status is not RequestStatus.WAITING:
            arrivals.popleft()
        oldest = arrivals[0] if arrivals else next_request
        return now - oldest.queued_at <= self._factor * self._last_prefill_s
