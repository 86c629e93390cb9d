"""The limit on open files. Every connection needs one file descriptor."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit.

    The usual soft limit of 1024 exists for programs that use select(), and would limit the number of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
