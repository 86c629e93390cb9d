"""Allocate the numbers by which a core and a frontend refer to a request."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

MAX_REQUEST_INDEX: Final = 2**31 - 1


class RequestIndices:
    """Allocates numbers in ascending order, wraps around after the largest, and skips those `in_use`."""

    def __init__(self, in_use: Container[int], last: int = -1) -> None:
        self._in_use = in_use
        self._last = last

    def next_free(self) -> int:
        """Return the next number that no unfinished request has."""
        while True:
            self._last = 0 if self._last == MAX_REQUEST_INDEX else self._last + 1
            if self._last not in self._in_use:
                return self._last
