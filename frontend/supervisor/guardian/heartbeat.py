"""The memory through which a supervisor shows its guardian that it does not hang."""

from __future__ import annotations

import enum
import mmap


class _State(enum.IntEnum):
    SILENT = 0
    SENT = 1
    ENDED = 2


class SupervisorHeartbeat:
    """A byte that the guardian shares with the supervisor. Unlike a socket, it cannot be full when nobody reads it."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def send(self) -> None:
        """Show that the supervisor handles events."""
        self._byte[0] = _State.SENT

    def end(self) -> None:
        """Send no more heartbeats, because the supervisor only waits for processes that it has killed."""
        self._byte[0] = _State.ENDED

    def was_sent(self) -> bool:
        """Return whether a heartbeat was sent since the last call, or heartbeats have ended."""
        state = self._byte[0]
        if state == _State.SENT:
            self._byte[0] = _State.SILENT
        return state != _State.SILENT

    def restart(self) -> None:
        """Expect heartbeats from another supervisor."""
        self._byte[0] = _State.SILENT
