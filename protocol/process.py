"""Start-up, logging and shutdown that all engine processes have in common.

The standard input of every process is one pipe, to which nothing is written. End of file means that the process that
holds the engine together has exited, for whatever reason: the guardian of `engine serve`, or the parent of an engine
without a guardian.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Final

import setproctitle

from .config.frontend import LogFormat

ORPHANED_EXIT_CODE = 3
"""Exit code of a process whose engine has lost its guardian."""


_PR_SET_PDEATHSIG: Final = 1

STOP_PROCESS: Final = signal.SIGVTALRM
"""The signal by which a supervisor stops one of its processes.

Nothing else sends it. By default, it ends a process that has not installed its handler yet.
"""


def ignore_stop_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP in this process and in those that it starts.

    Terminals, service managers and `pkill` send them to many processes at once. The process that the user started
    handles them, and decides when the others stop. If they handled them as well, cores would stop in the middle of
    streams.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def name_process(name: str) -> None:
    """Set the process title that `ps` shows."""
    setproctitle.setproctitle(f"engine: {name}")


def return_free_memory() -> None:
    """Return freed memory to the system."""
    # Other C libraries than glibc return it themselves, or have no such call.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def send_when_parent_exits(signum: int) -> bool:
    """Let the kernel send this process a signal when the thread that started it exits. Return whether that works."""
    return sys.platform == "linux" and bool(
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) == 0
    )


def exit_with_parent(run_dir: str, sockets: Iterable[str] = ()) -> None:
    """Exit at the end of standard input, after removing `run_dir` and `sockets`. Ignore stop signals.

    The caller may change `sockets` until then.
    """
    ignore_stop_signals()

    def wait_for_end_of_file() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(run_dir, ignore_errors=True)
        for path in sockets:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os._exit(ORPHANED_EXIT_CODE)

    threading.Thread(target=wait_for_end_of_file, name="parent watch", daemon=True).start()


logged_request_id: ContextVar[str] = ContextVar("logged_request_id", default="")
"""The ID of the request that the current task handles, for JSON logs."""


def json_log_line(level: str, process: str, message: str, **more: object) -> str:
    """Return a line of a JSON log. `more` are additional fields, omitted where None or ""."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": now, "level": level.lower(), "process": process, "message": message}
    return json.dumps(
        line | {name: value for name, value in more.items() if value not in (None, "")}
    )


class JSONFormatter(logging.Formatter):
    """Formats each log record as a JSON object on one line.

    The request ID is the one of the current task, or `extra={"request_id": …}` of the record.

    Args:
        process: The name of the process, such as "core 0".
        replica: The replica that the process belongs to; None for none.
    """

    def __init__(self, process: str, replica: int | None = None) -> None:
        super().__init__()
        self._process = process
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object for a record."""
        return json_log_line(
            record.levelname,
            self._process,
            record.getMessage(),
            replica=self._replica,
            logger=record.name,
            request_id=getattr(record, "request_id", "") or logged_request_id.get(),
            traceback=self.formatException(record.exc_info) if record.exc_info else "",
            stack=record.stack_info,
        )


def configure_logging(
    name: str, level: str, log_format: LogFormat, replica: int | None = None
) -> None:
    """Log to standard error, one line per event, with the name of the process.

    With the log format JSON, Python warnings and uncaught exceptions are logged in JSON as well.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JSONFormatter(name, replica))
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = lambda args: _log_exception(
            args.exc_type, args.exc_value, args.exc_traceback
        )
    else:
        text = f"%(asctime)s %(levelname)s {name}: %(message)s"
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _log_exception(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    if error is None or issubclass(kind, SystemExit):
        return
    exc_info = (kind, error, traceback)
    logging.getLogger(__name__).critical("uncaught exception", exc_info=exc_info)


class StopSignal:
    """Records that `STOP_PROCESS` arrived, and wakes a poll on `fd`."""

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
        signal.signal(STOP_PROCESS, self._request)

    def add_signal(self, signum: signal.Signals) -> None:
        """Make this signal wake `fd` as well, and report it from `take_signals`."""
        signal.signal(signum, self._note)

    def take_signals(self) -> set[int]:
        """Return the added signals that arrived since the last call, and rearm `fd`."""
        arrived: set[int] = set()
        # In this order, neither a signal nor its wake-up byte can be left without the other.
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
