"""Background processes that the caller of a command does not wait for."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import Final

_OUTPUTS: Final = (1, 2)


def continue_in_background() -> Callable[[], None]:
    """Fork, and return in the child process only.

    When the child calls the returned function, the parent exits with code 0. If the child exits before that, the parent
    exits with the child's code.
    """
    is_ready, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(is_ready)
        os.setsid()

        def end_parent() -> None:
            os.write(ready, b"\n")
            os.close(ready)

        return end_parent
    os.close(ready)
    if os.read(is_ready, 1):
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def leave_pipes(log_fd: int | None, keep_stderr: Callable[[], None]) -> None:
    """Write to a log instead of to pipes and sockets of the caller, who may wait for their end.

    Files, terminals and the journal of systemd remain the output. Without a log, the output is discarded.

    Args:
        log_fd: The log.
        keep_stderr: Called before standard error changes. It may keep a copy, which must be closed at the end of the
            start.
    """
    held = [fd for fd in _OUTPUTS if _is_held(fd)]
    if sys.stderr.fileno() in held:
        keep_stderr()
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in held:
        os.dup2(null if log_fd is None else log_fd, fd)
    os.close(null)


def _is_held(fd: int) -> bool:
    """Return whether a reader of this output could wait until the last process has closed it."""
    status = os.fstat(fd)
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
    return stat.S_ISFIFO(status.st_mode) or (stat.S_ISSOCK(status.st_mode) and not is_journal)
