"""Find the requests that are past their deadline."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from ...state.request import RUNNING, Request

_MIN_FINISHED: Final = 64
"""Number by which entries of finished requests must exceed the others before they are removed."""


class Deadlines:
    """The unfinished requests that have a deadline.

    Entries of finished requests stay until they are removed in bulk.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def add_request(self, request: Request) -> None:
        """Add a request that has a deadline."""
        heapq.heappush(self._entries, (request.deadline, request.arrival, request))

    def is_any_past(self, now: float) -> bool:
        """Return whether the earliest deadline has passed."""
        return bool(self._entries) and self._entries[0][0] <= now

    def pop_expired(self, now: float) -> Iterator[tuple[Request, float]]:
        """Remove and yield (request, deadline) for each unfinished request that is past its deadline."""
        entries = self._entries
        while entries and (entries[0][0] <= now or entries[0][2].is_finished):
            deadline, _, request = heapq.heappop(entries)
            if not request.is_finished:
                yield request, deadline

    def remove_finished(self, num_requests: int) -> None:
        """Remove the entries of finished requests if most are; `num_requests` are unfinished."""
        if len(self._entries) > 2 * num_requests + _MIN_FINISHED:
            self._entries = [entry for entry in self._entries if not entry[2].is_finished]
            heapq.heapify(self._entries)


def describe_expiry(request: Request, deadline: float) -> str:
    """Return the error message for a request that reached its deadline."""
    allowed_s = deadline - request.queued_at
    if allowed_s <= 0:
        return "the request reached the scheduler after its deadline"
    state = "still queued" if request.status < RUNNING else "still running"
    return (
        f"the request was {state} at its deadline, {max(allowed_s, 0.001):.3f} s after it arrived"
    )
