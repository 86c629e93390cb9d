"""Which other engines live: the frontends of a dead one can no longer continue its requests."""

from __future__ import annotations

import fcntl
import os


class OtherEngines:
    """Finds out whether engines live, by the locks of their run directories.

    The supervisor of an engine and all of its frontends hold that lock. So it is free only when none of them can send
    a token to a client.
    """

    def __init__(self) -> None:
        self._directories: dict[str, int] = {}

    def is_alive(self, run: str) -> bool:
        """Return whether the engine with a run directory lives."""
        descriptor = self._directories.get(run)
        if descriptor is None:
            try:
                descriptor = os.open(
                    run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                )
            except OSError:
                return False
            # The engine may be killed, and its directory deleted, before its last process ends.
            self._directories[run] = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        os.close(self._directories.pop(run))
        return False

    def close(self) -> None:
        """Close the directories."""
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()
