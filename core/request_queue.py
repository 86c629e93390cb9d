"""Requests that wait for admission, in the order of the policy."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque

from .request import Request


class RequestQueue(ABC):
    """A queue from which requests may leave anywhere: those that finished are dropped when met."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Append an arrival."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """Put a request back in the place that its arrival gives it."""

    @abstractmethod
    def peek(self) -> Request | None:
        """The next request to admit."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove the request that `peek` returns."""


class FCFSQueue(RequestQueue):
    """First come, first served: what was restored came before every arrival that still waits behind it."""

    def __init__(self) -> None:
        self._arrivals: deque[Request] = deque()
        self._restored: list[tuple[int, Request]] = []

    def add(self, request: Request) -> None:
        self._arrivals.append(request)

    def restore(self, request: Request) -> None:
        heapq.heappush(self._restored, (request.arrival, request))

    def peek(self) -> Request | None:
        while self._arrivals and self._arrivals[0].status.is_finished:
            self._arrivals.popleft()
        while self._restored and self._restored[0][1].status.is_finished:
            heapq.heappop(self._restored)
        if self._is_restored_next():
            return self._restored[0][1]
        return self._arrivals[0] if self._arrivals else None

    def pop(self) -> Request:
        if self._is_restored_next():
            return heapq.heappop(self._restored)[1]
        return self._arrivals.popleft()

    def _is_restored_next(self) -> bool:
        if not self._restored:
            return False
        return not self._arrivals or self._restored[0][0] < self._arrivals[0].arrival
