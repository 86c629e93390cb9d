"""Startup output on the terminal: one line per stage, and a progress bar while bytes are transferred."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TextIO

from ...protocol.config.frontend import LogFormat
from ...protocol.errors import EngineError
from ...protocol.process import json_log_line
from ...protocol.supervisor_messages import ProcessStatus, Stage

P = ParamSpec("P")

BAR_WIDTH = 24
"""Width of the progress bar in characters."""
REDRAW_S = 0.05
"""Minimum seconds between redraws on a terminal."""
PLAIN_REPEAT_S = 10.0
"""Seconds between progress lines if the output is not a terminal."""


def format_bytes(count: float) -> str:
    """Return a size such as `98.4 MB`: three significant digits in decimal units."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or count >= 99.95 else 1
    return f"{count:.{digits}f} {units[0]}"


class Console:
    """Writes lines that start with the seconds since the console was created.

    On a terminal, the line of a running transfer is redrawn in place. Otherwise it is printed when the transfer begins,
    every ten seconds, and when it ends. In the format `json`, each line is a JSON object.
    """

    log_format: LogFormat = "text"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._started = time.monotonic()
        self._bar: str | None = None
        self._last_drawn = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the console was created."""
        return time.monotonic() - self._started

    def keep_stream(self) -> None:
        """Write to a copy of standard error, even if that is redirected, until `release_stream`."""
        self._stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")

    def release_stream(self) -> None:
        """Write to standard error from now on, and close the copy of it in this process."""
        if self._stream is not sys.stderr:
            self._stream.close()
            self._stream = sys.stderr

    def line(self, text: str) -> None:
        """Write a line."""
        self._end_bar()
        self._write_line("info", self._stamped(text), text)

    def error(self, text: str) -> None:
        """Write the error that ends the program, without a timestamp so that scripts can find it."""
        self._end_bar()
        self._write_line("error", f"engine: error: {text}", text)

    def progress(self, label: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes were transferred. `done >= total` completes the bar."""
        finished = done >= total
        now = time.monotonic()
        if label != self._bar:
            self._end_bar()
            self._bar = label
        elif not finished:
            interval = REDRAW_S if self._draws_bars else PLAIN_REPEAT_S
            if now - self._last_drawn < interval:
                return
        self._last_drawn = now
        self._draw(label, min(done, total), total)
        if finished:
            self._end_bar()

    @property
    def _draws_bars(self) -> bool:
        return self._on_terminal and self.log_format == "text"

    def _draw(self, label: str, done: int, total: int) -> None:
        fraction = done / total if total else 1.0
        amount = f"{fraction:4.0%}  {format_bytes(done)} of {format_bytes(total)}"
        if self._draws_bars:
            filled = round(fraction * BAR_WIDTH)
            bar = "█" * filled + "░" * (BAR_WIDTH - filled)
            self._write(f"\r{self._stamped(label)}  {bar} {amount}\x1b[K")
        else:
            text = f"{label}  {amount}"
            self._write_line("info", self._stamped(text), text)

    def _end_bar(self) -> None:
        if self._bar is not None and self._draws_bars:
            self._write("\n")
        self._bar = None

    def _stamped(self, text: str) -> str:
        return f"[{self.elapsed_s:7.2f} s] {text}"

    def _write_line(self, level: str, shown: str, text: str) -> None:
        """Write a line: `shown` in the text format, or an object with `text` in the JSON format."""
        is_json = self.log_format == "json"
        line = json_log_line(level, "supervisor", text) if is_json else shown
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        # A closed terminal must not stop the server.
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._on_terminal = False


class StartupProgress:
    """Merges the reports of many processes into one line per startup stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._loading: dict[str, tuple[int, int]] = {}
        self._loaded = False
        self._warming = False

    def update(self, status: ProcessStatus) -> None:
        """Show a report of one process."""
        if status.stage is Stage.LOADING and status.total and not self._loaded:
            self._loading[status.process] = (status.done, status.total)
            done = sum(done for done, _ in self._loading.values())
            total = sum(total for _, total in self._loading.values())
            self._console.progress("loading weights", done, total)
            self._loaded = done >= total
        elif status.stage is Stage.WARMING and not self._warming:
            self._warming = True
            self._console.line(f"warming up  {status.detail}".rstrip())


def reports_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate the function of a command, so that it writes the error that ends it and returns an exit code."""

    @functools.wraps(main)
    def run(*args: P.args, **keywords: P.kwargs) -> int:
        try:
            return main(*args, **keywords)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            return 0
        except (EngineError, OSError, UnicodeDecodeError) as error:
            Console().error(str(error))
            return 1

    return run
