"""How an engine process is born and how it ends.

Every child is started with a pipe from the supervisor as its standard input: end of file means that the supervisor is
gone, however it died. Only a process that was started before it was needed reads anything from it: its epoch.
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
from types import FrameType

import setproctitle

ORPHANED_EXIT_CODE = 3


def name_process(name: str) -> None:
    """Give the process the title that `ps` shows."""
    setproctitle.setproctitle(f"engine: {name}")


def await_epoch() -> int:
    """Wait until the parent says in which epoch this process is to begin, in a line on standard input."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 64)
        if not piece:
            os._exit(ORPHANED_EXIT_CODE)
        line += piece
    return int(line)


def die_with_parent(run_dir: str, *sockets: str) -> None:
    """Exit at once when the parent's end of standard input closes, leaving neither `run_dir` nor `sockets`."""

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
    """Log to standard error, one line an event, with the process's name."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


class StopSignal:
    """Remembers that SIGTERM came, and wakes a poll on `fd`.

    SIGINT is ignored: the terminal sends it to the supervisor, which decides what becomes of the others.
    """

    def __init__(self) -> None:
        self.requested = False
        self._noted: set[int] = set()
        self._wake, wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        self.fd = self._wake.fileno()
        """Readable once a signal has come."""
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch(self, signum: signal.Signals) -> None:
        """Let this signal, too, make `fd` readable, and be found by `take`."""
        signal.signal(signum, self._note)

    def take(self) -> set[int]:
        """The watched signals that came since the last call; `fd` waits for the next."""
        noted: set[int] = set()
        # In this order neither a signal nor its byte can be left behind without the other.
        while self._noted:
            found, self._noted = self._noted, set()
            noted |= found
            with contextlib.suppress(BlockingIOError):
                while self._wake.recv(64):
                    pass
        return noted

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted.add(signum)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
