"""Limits the file descriptors of client connections, and reserves some for probes."""

from __future__ import annotations

import resource
from typing import Final, Protocol

MAX_RESERVED: Final = 64
"""Maximum descriptors reserved for probes and for the process's own files."""


class Closable(Protocol):
    """A connection that can be closed."""

    def close_now(self) -> None:
        """Close the connection immediately."""


class DescriptorReserve:
    """The connections that use the last file descriptors of this process; they serve probes only.

    A new descriptor gets the lowest free number, so its number shows how many are in use. Half of the reserved
    descriptors are for probes. When all of these are in use, the oldest connection is closed for each new one, so that
    idle clients cannot block probes. The other half is reserved for the process's own files.
    """

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 2**31
        reserved = min(MAX_RESERVED, limit // 4)
        self._first_for_probes = limit - reserved
        self._max_for_probes = reserved // 2
        self._connections: dict[Closable, None] = {}

    def add_connection(self, connection: Closable, descriptor: int) -> bool:
        """Register a new connection and return whether it may serve probes only."""
        if descriptor < self._first_for_probes:
            return False
        if len(self._connections) >= self._max_for_probes:
            oldest = next(iter(self._connections))
            self.remove_connection(oldest)
            oldest.close_now()
        self._connections[connection] = None
        return True

    def remove_connection(self, connection: Closable) -> None:
        """Unregister a connection that has ended."""
        self._connections.pop(connection, None)
