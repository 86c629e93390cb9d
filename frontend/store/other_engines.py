"""Find out which other engines still run. The requests of an engine that has exited can be taken over."""

from __future__ import annotations

import fcntl
import os


class OtherEngines:
    """Finds out whether engines are running, by the locks of their run directories.

    The supervisor and all frontends of an engine hold its lock. So the lock is free only when none of them can send
    another token to a client.
    """

    def __init__(self) -> None:
        self._directories: dict[str, int] = {}

    def is_alive(self, run: str) -> bool:
        """Return whether the engine with the run directory `run` is still running."""
        descriptor = self._directories.get(run)
        if descriptor is None:
            try:
                descriptor = os.open(
                    run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                )
            except OSError:
                return False
            # The supervisor may be killed and the directory deleted before the engine's last process ends.
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
