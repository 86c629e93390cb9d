"""Stop signals (SIGTERM, SIGINT, SIGHUP) as events of a poll loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_TOGETHER_S: Final = 0.05


class StopRequested(Exception):
    """A stop signal was received."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """A context manager that makes `fd` readable on a stop signal instead of ending the process.

    The parent process may have blocked signals, which children would inherit, or ignored SIGCHLD, which prevents
    waiting for children. Both are undone while the context is active. An ignored SIGHUP stays ignored, because nohup
    relies on it.
    """

    def __init__(self) -> None:
        self._num_direct = self._num_forwarded = self._num_raised = 0
        self.fd, self._write_fd = _make_pipe()

    def take(self) -> int:
        """Return a signal that was received since the last call; 0 if there was none.

        One stop request may arrive as two signals, one to the process and one to its group. For example, `timeout`
        sends both, and so does a parent that forwards Ctrl-C. Two signals in quick succession therefore count once.
        """
        try:
            received = os.read(self.fd, 1)
        except BlockingIOError:
            return 0
        time.sleep(_TOGETHER_S)
        with suppress(BlockingIOError):
            os.read(self.fd, 1024)
        return received[0]

    def raise_if_received(self, forwarded: Sequence[int] = ()) -> None:
        """Raise StopRequested once for each stop request. The second one interrupts a drain.

        `forwarded` are signals that the parent process received since the last call. A signal to all processes at once
        arrives both directly and through the parent, so the requests are those of the source with more.
        """
        signum = self.take()
        self._num_direct += bool(signum)
        self._num_forwarded += len(forwarded)
        num_requests = max(self._num_direct, self._num_forwarded)
        if num_requests > self._num_raised:
            self._num_raised = num_requests
            raise StopRequested(signum or forwarded[-1])

    def separate(self) -> None:
        """Receive signals of this process only, after a fork."""
        os.close(self.fd)
        os.close(self._write_fd)
        self.fd, self._write_fd = _make_pipe()

    def __enter__(self) -> StopSignals:
        self._previous = {
            s: signal.signal(s, self._on_signal)
            for s in STOP_SIGNALS
            if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN
        }
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous_mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self.fd)
        os.close(self._write_fd)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        os.write(self._write_fd, bytes([signum]))


def _make_pipe() -> tuple[int, int]:
    """Return the reading end of a pipe, which does not block, and its writing end."""
    reading_fd, writing_fd = os.pipe()
    os.set_blocking(reading_fd, False)
    return reading_fd, writing_fd
