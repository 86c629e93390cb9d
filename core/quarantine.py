"""Requests that may have killed a worker, found out by running each of them alone.

Suspects are those that a worker was computing when it died and that had no token yet since they were admitted.
Each is tried: nothing else is computed until its next token is there. A worker that dies meanwhile convicts it.
"""

from __future__ import annotations

from typing import NamedTuple

from .request import Request, RequestKey
from .request_queue import RequestQueue


class Accused(NamedTuple):
    """The requests in the steps in flight. `bystanders` had a token since they were admitted."""

    convicts: list[RequestKey]
    suspects: list[RequestKey]
    bystanders: list[RequestKey]


class Quarantine:
    """Holds the live suspects, and picks the one to try."""

    def __init__(self, queue: RequestQueue) -> None:
        self.suspects: dict[RequestKey, Request] = {}
        self._queue = queue

    def add(self, request: Request) -> None:
        self.suspects[request.key] = request

    def release(self, request: Request) -> None:
        """The request is above suspicion, or over. Harmless for any other."""
        self.suspects.pop(request.key, None)

    def next(self) -> Request | None:
        """The suspect that runs, or that is first in the queue."""
        if not self.suspects:
            return None
        for request in self.suspects.values():
            if request.slot >= 0:
                return request
        first = self._queue.peek()
        return first if first is not None and first.key in self.suspects else None
