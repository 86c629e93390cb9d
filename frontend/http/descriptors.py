"""Limits the file descriptors of client connections, and reserves some for probes."""

from __future__ import annotations

import resource
from itertools import islice
from typing import Final, Protocol

MAX_RESERVED: Final = 64
"""Maximum descriptors reserved for probes and for the process's own files."""


NUM_EXAMINED: Final = 64
"""Maximum connections that are examined for each new one, to find an idle one."""


def find_reserved() -> tuple[int, int]:
    """Return the first of the process's descriptors that are reserved, and how many there are."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**31
    num_reserved = min(MAX_RESERVED, limit // 4)
    return limit - num_reserved, num_reserved


class Closable(Protocol):
    """A connection that can be closed."""

    @property
    def is_idle(self) -> bool:
        """True if no request is complete enough to be answered, and none has just arrived."""

    def close_now(self) -> None:
        """Close the connection immediately."""


class DescriptorReserve:
    """The connections of this process. Those that use its last file descriptors serve probes only.

    A new descriptor gets the lowest free number, so its number shows how many are in use. When only the reserved ones
    are left, idle connections are closed, so that idle clients cannot block others. If none is idle, a new connection
    serves probes only. Half of the reserved descriptors are for these. When all of these are in use, the oldest one is
    closed for each new one. The other half is reserved for the process's own files.
    """

    def __init__(self) -> None:
        self._first_for_probes, num_reserved = find_reserved()
        self._max_for_probes = num_reserved // 2
        self._connections: dict[Closable, None] = {}
        self._probes: dict[Closable, None] = {}

    def add_connection(self, connection: Closable, descriptor: int) -> bool:
        """Register a new connection and return whether it may serve probes only."""
        # The descriptors of closed connections become free only after this tick.
        num_reserved = descriptor - self._first_for_probes
        if num_reserved < 0 or (self._close_idle() and num_reserved < self._max_for_probes):
            self._connections[connection] = None
            return False
        if len(self._probes) >= self._max_for_probes:
            oldest = next(iter(self._probes))
            del self._probes[oldest]
            oldest.close_now()
        self._probes[connection] = None
        return True

    def _close_idle(self) -> bool:
        """Close idle connections among those that were examined least recently. Return False if none is idle."""
        num_closed = 0
        for connection in list(islice(self._connections, NUM_EXAMINED)):
            del self._connections[connection]
            if connection.is_idle and num_closed < self._max_for_probes:
                connection.close_now()
                num_closed += 1
            else:
                self._connections[connection] = None
        return num_closed > 0

    def remove_connection(self, connection: Closable) -> None:
        """Unregister a connection that has ended."""
        self._connections.pop(connection, None)
        self._probes.pop(connection, None)
