"""A queue from several threads to one thread that polls file descriptors."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WakingQueue(Generic[T]):
    """A queue whose `fd` is readable while it has items."""

    def __init__(self) -> None:
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._items: deque[T] = deque()

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while there are items."""
        return self._wake.fileno()

    def put(self, item: T) -> None:
        """Add an item, and wake the thread that polls."""
        self._items.append(item)
        # If the buffer is full, the thread will wake up anyway.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def take(self) -> Iterator[T]:
        """Yield the items, removing each one before it is yielded."""
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass
        while self._items:
            yield self._items.popleft()

    def clear(self) -> None:
        """Discard all items."""
        self._items.clear()
