"""A program on a pseudo-terminal, for tests of interactive use."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from typing import Self

from support.processes.program import STOP_TIMEOUT_S

ROWS, COLUMNS = 30, 100
SHOWN = 600
"""Characters of the screen that a failure shows."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """A program whose standard streams are a terminal of `ROWS` x `COLUMNS` characters. Use it as a context manager."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._control, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)
        self.screen = ""

    def type(self, text: str) -> int:
        """Type text, and return the length of the screen's text before it."""
        before = len(self.screen)
        os.write(self._control, text.encode())
        return before

    def wait_for(self, pattern: str, since: int = 0, timeout_s: float = 120.0) -> None:
        """Read until the screen's text after `since`, without escape sequences, has a match of `pattern`."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.screen[since:]):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not in {self.screen[since:][-SHOWN:]!r}"
            ready, _, _ = select.select([self._control], [], [], left)
            if not ready:
                continue
            try:
                data = os.read(self._control, 65536)
            except OSError:
                data = b""
            assert data, f"ended without {pattern!r}: {self.screen[since:][-SHOWN:]!r}"
            self.screen += _ESCAPES.sub("", data.decode(errors="replace"))

    def wait(self) -> int:
        """Wait until the program has exited and return its exit code."""
        return self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(STOP_TIMEOUT_S)
        os.close(self._control)


def _take_terminal() -> None:
    """Make Ctrl-C reach this process, even if a parent that runs in the background ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
