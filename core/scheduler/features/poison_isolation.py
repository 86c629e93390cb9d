"""Run requests that may have crashed a worker one at a time, to find the poison request.

A request becomes a suspect if a worker crashed while computing it, before its first token since its admission. Each
suspect runs alone in its steps until its next token arrives. If a worker crashes meanwhile, that suspect is the cause.
"""

from __future__ import annotations

from typing import NamedTuple

from ...state.request import Request, RequestKey
from ..queues.request_queue import RequestQueue


class CrashSuspects(NamedTuple):
    """The requests that were being computed when a worker crashed.

    The `poison_requests` were running alone, so they caused the crash. The `unsuspected` ones had already got a token
    since their admission.
    """

    poison_requests: list[RequestKey]
    suspects: list[RequestKey]
    unsuspected: list[RequestKey]


class PoisonIsolation:
    """Holds the suspected requests, and picks the next one to run alone."""

    def __init__(self, queue: RequestQueue) -> None:
        self.suspects: dict[RequestKey, Request] = {}
        self._queue = queue

    def add_suspect(self, request: Request) -> None:
        """Add a suspected request."""
        self.suspects[request.key] = request

    def clear_suspect(self, request: Request) -> None:
        """Remove a suspect that got a token or finished. Other requests are ignored."""
        self.suspects.pop(request.key, None)

    def next_suspect(self) -> Request | None:
        """Return the suspect to run alone: the one already running, or else the first in the queue."""
        if not self.suspects:
            return None
        for request in self.suspects.values():
            if request.slot >= 0:
                return request
        first = self._queue.peek_request()
        return first if first is not None and first.key in self.suspects else None
