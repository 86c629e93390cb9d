"""The limit on open files, of which each connection is one."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit.

    Each connection is a file, and the usual soft limit of 1024 exists for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
