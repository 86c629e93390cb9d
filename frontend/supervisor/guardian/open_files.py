"""The limit on open files. Every connection needs one file descriptor."""

from __future__ import annotations

import resource
from typing import Final

from ....protocol.errors import ConfigError

MIN_PROCESSES: Final = 4
"""Number of processes of the smallest engine: a worker, a core, the store and a frontend."""

_FIXED: Final = 32
_PER_PROCESS: Final = 8
"""Maximum descriptors of the supervisor, which has the most: its own, and those for each process that it watches."""


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit.

    The usual soft limit of 1024 exists for programs that use select(), and would limit the number of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def verify_open_file_limit(num_processes: int = MIN_PROCESSES) -> None:
    """Raise ConfigError if the limit on open files is too low for an engine of so many processes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FIXED + _PER_PROCESS * num_processes
    if limit != resource.RLIM_INFINITY and limit < least:
        raise ConfigError(
            f"the limit on open files (ulimit -n) is {limit}, but {num_processes} processes need at least {least}, "
            "and each connection of a client one more; raise the hard limit (ulimit -Hn)"
        )
