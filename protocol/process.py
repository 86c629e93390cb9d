"""Starting, logging and ending of engine processes.

The standard input of every child is a pipe from the supervisor. End of file means that the supervisor has ended, for
whatever reason. Only a spare process reads anything else from it: its epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from types import FrameType

import setproctitle

ORPHANED_EXIT_CODE = 3
"""Exit code of a process whose supervisor has ended."""


def name_process(name: str) -> None:
    """Set the process title that `ps` shows."""
    setproctitle.setproctitle(f"engine: {name}")


def await_epoch() -> int:
    """Read the epoch in which this process is to start, a line on standard input. Wait until it arrives."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 64)
        if not piece:
            os._exit(ORPHANED_EXIT_CODE)
        line += piece
    return int(line)


def exit_with_parent(run_dir: str, sockets: Iterable[str] = ()) -> None:
    """Exit as soon as the parent's end of standard input closes, after removing `run_dir` and `sockets`.

    The caller may change `sockets` until then.
    """

    def wait_for_end_of_file() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(run_dir, ignore_errors=True)
        for path in sockets:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os._exit(ORPHANED_EXIT_CODE)

    threading.Thread(target=wait_for_end_of_file, name="parent watch", daemon=True).start()


def configure_logging(name: str, level: str) -> None:
    """Log to standard error, one line per event, with the process's name."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


class StopSignal:
    """Records that SIGTERM arrived, and wakes a poll on `fd`.

    SIGINT is ignored: the terminal sends it to the supervisor as well, which decides what the other processes do.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pending: set[int] = set()
        self._wake, wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        self.fd = self._wake.fileno()
        """Readable once a signal has arrived."""
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def add_signal(self, signum: signal.Signals) -> None:
        """Make this signal wake `fd` as well, and report it from `take_signals`."""
        signal.signal(signum, self._note)

    def take_signals(self) -> set[int]:
        """Return the added signals that arrived since the last call, and rearm `fd`."""
        arrived: set[int] = set()
        # In this order, neither a signal nor its byte can remain without the other.
        while self._pending:
            found, self._pending = self._pending, set()
            arrived |= found
            with contextlib.suppress(BlockingIOError):
                while self._wake.recv(64):
                    pass
        return arrived

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pending.add(signum)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
