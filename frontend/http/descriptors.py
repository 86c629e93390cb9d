"""File descriptors that connections of clients may use, and those that are kept for probes."""

from __future__ import annotations

import resource
from typing import Final, Protocol

MAX_RESERVED: Final = 64
"""Descriptors at the end of the process's limit that are for probes and for its own files."""


class Cuttable(Protocol):
    def cut(self) -> None:
        """Close the connection at once."""


class DescriptorReserve:
    """The connections for which the last descriptors of this process are used.

    A descriptor has the lowest free number, so its number says how many are in use. Connections with the last numbers
    are for probes. When there are many of these, too, the oldest is closed for each that comes, so that clients which
    send nothing keep no probe out. As many descriptors remain for the process's own files.
    """

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 2**31
        reserved = min(MAX_RESERVED, limit // 4)
        self._first_for_probes = limit - reserved
        self._max_for_probes = reserved // 2
        self._connections: dict[Cuttable, None] = {}

    def add(self, connection: Cuttable, descriptor: int) -> bool:
        """Return whether this new connection is one of the last, which are for probes."""
        if descriptor < self._first_for_probes:
            return False
        if len(self._connections) >= self._max_for_probes:
            oldest = next(iter(self._connections))
            self.remove(oldest)
            oldest.cut()
        self._connections[connection] = None
        return True

    def remove(self, connection: Cuttable) -> None:
        self._connections.pop(connection, None)
