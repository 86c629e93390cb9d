"""Reports on their way from the threads of a connector to the worker's main thread."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from ...protocol.worker_messages import KVConnectorOutput


class ReportQueue:
    """Reports of any thread. `fd` is readable while there are some."""

    def __init__(self) -> None:
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._reports: deque[KVConnectorOutput] = deque()

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while there are reports."""
        return self._wake.fileno()

    def put(self, report: KVConnectorOutput) -> None:
        """Add a report, and wake the main thread."""
        self._reports.append(report)
        # A full buffer wakes it as well.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def take(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call."""
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def clear(self) -> None:
        """Drop all reports."""
        self._reports.clear()
