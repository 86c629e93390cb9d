"""Limit the total memory of the large requests of one frontend."""

from __future__ import annotations

from typing import Final

from ...http.errors import APIError, unavailable
from .structure import FREE_BYTES

RETRY_AFTER_S: Final = 1.0
"""Seconds after which a client may retry."""


class RequestMemory:
    """Counts the bytes of bodies larger than `FREE_BYTES`, from their arrival to the end of their requests.

    Smaller bodies are bounded by the queue limit. Incomplete bodies may use at most half of the memory, so that slow
    senders cannot keep other requests out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0
        self._num_arriving = 0

    def lease(self) -> MemoryLease:
        """Return a new lease on the memory, for one request."""
        return MemoryLease(self)

    def count_arriving(self, num_bytes: int) -> None:
        """Count a part of a body that is arriving. Raise APIError 503 if there is not enough memory."""
        others = self.num_bytes - self._num_arriving
        if self._num_arriving + num_bytes > self._limit // 2 or (
            others + self._num_arriving + num_bytes > self._limit
        ):
            raise self._full()
        self.num_bytes += num_bytes
        self._num_arriving += num_bytes

    def count(self, num_bytes: int) -> None:
        """Count memory of a request that has arrived. Raise APIError 503 if there is not enough memory."""
        if self.num_bytes + num_bytes > self._limit:
            raise self._full()
        self.num_bytes += num_bytes

    def mark_complete(self, num_bytes: int) -> None:
        """Record that a body of `num_bytes` has arrived completely."""
        self._num_arriving -= num_bytes

    def _full(self) -> APIError:
        return unavailable(
            f"large requests already use {self.num_bytes} bytes of memory, and at most {self._limit} are allowed "
            "(--max-request-memory); retry in 1 s",
            RETRY_AFTER_S,
        )

    def release(self, num_bytes: int) -> None:
        """Free the memory of a request that has ended."""
        self.num_bytes -= num_bytes


class MemoryLease:
    """The memory that one request uses. Enter it as a context until the request ends."""

    __slots__ = ("_is_complete", "_memory", "_num_bytes", "_num_counted", "_num_media")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._num_bytes = self._num_counted = self._num_media = 0
        self._is_complete = False

    def count_bytes(self, num_bytes: int) -> None:
        """Count a part of the body. Raise APIError 503 if there is not enough memory."""
        self._num_bytes += num_bytes
        if self._num_bytes > FREE_BYTES:
            uncounted = self._num_bytes - self._num_counted
            self._memory.count_arriving(uncounted)
            self._num_counted += uncounted

    def mark_complete(self) -> None:
        """Record that the body has arrived completely."""
        if not self._is_complete:
            self._is_complete = True
            self._memory.mark_complete(self._num_counted)

    def count_media(self, num_bytes: int) -> None:
        """Count the bytes of a request's images or audio, after its body is complete.

        Raises:
            APIError: There is not enough memory (503).
        """
        self._memory.count(num_bytes)
        self._num_media += num_bytes

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.mark_complete()
        self._memory.release(self._num_counted + self._num_media)
