"""A bound on the memory that all requests of one frontend hold together."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from ...http.errors import unavailable
from .structure import FREE_BYTES

RETRY_AFTER_S: Final = 1.0


class RequestMemory:
    """The bytes of bodies of more than `FREE_BYTES`, from their arrival to the end of their requests.

    Smaller ones are bounded by the queue.

    Bodies that are not complete get half of the memory at most, so that slow senders cannot keep others out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0
        self._num_arriving = 0

    def lease(self) -> MemoryLease:
        return MemoryLease(self)

    def add(self, num_bytes: int) -> None:
        """Count a part of a body that is arriving. Raises APIError 503 if there is no room for it."""
        others = self.num_bytes - self._num_arriving
        if self._num_arriving + num_bytes > self._limit // 2 or (
            others + self._num_arriving + num_bytes > self._limit
        ):
            raise unavailable(
                f"large requests already use {self.num_bytes} bytes of memory, and at most {self._limit} are allowed "
                "(--max-request-memory); retry in 1 s",
                RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes
        self._num_arriving += num_bytes

    def body_is_complete(self, num_bytes: int) -> None:
        self._num_arriving -= num_bytes

    def release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class MemoryLease:
    """What one request holds; entered for as long as it does."""

    __slots__ = ("_is_complete", "_memory", "_num_bytes", "_num_counted")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._num_bytes = self._num_counted = 0
        self._is_complete = False

    def add(self, num_bytes: int) -> None:
        """Count a part of the body. Raises APIError 503 if there is no room for it."""
        self._num_bytes += num_bytes
        if self._num_bytes > FREE_BYTES:
            uncounted = self._num_bytes - self._num_counted
            self._memory.add(uncounted)
            self._num_counted += uncounted

    def complete(self) -> None:
        """The body has arrived."""
        if not self._is_complete:
            self._is_complete = True
            self._memory.body_is_complete(self._num_counted)

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.complete()
        self._memory.release(self._num_counted)
