"""Read the user's messages: from the terminal with line editing and a history, or from a pipe."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from ...cache_directory import cache_directory

PROMPT: Final = ">>> "
CONTINUED: Final = "... "
QUOTES: Final = '"""'
"""The line that begins and ends a message of several lines."""
HISTORY_LINES: Final = 1000


class EndOfInput(Exception):
    """Raised when there are no more messages."""


class LineInput:
    """The source of the user's messages. The prompt is shown on a terminal only."""

    def __init__(self) -> None:
        self.on_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def read_message(self) -> str:
        """Return the next message: one line, or the lines between two lines of three quotes.

        Raises:
            EndOfInput: There are no more messages.
            KeyboardInterrupt: The user pressed Ctrl-C.
        """
        line = self._read_line(PROMPT)
        if not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._read_line(CONTINUED)
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str:
        try:
            return input(prompt if self.on_terminal else "")
        except EOFError:
            if self.on_terminal:
                print()
            raise EndOfInput from None

    @contextmanager
    def editing(self, commands: Iterable[str]) -> Iterator[None]:
        """Enable readline on a terminal: a history of earlier sessions, and Tab to complete commands.

        Args:
            commands: The names of the commands, including their slash.
        """
        try:
            import readline
        except ImportError:
            yield
            return
        if not self.on_terminal:
            yield
            return
        path = cache_directory("chat") / "history"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Messages may be confidential, so only the owner may read the history.
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            readline.read_history_file(path)
        readline.set_history_length(HISTORY_LINES)
        names = sorted(commands)

        def complete(text: str, state: int) -> str | None:
            found = complete_line(readline.get_line_buffer(), text, names)
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                readline.write_history_file(path)


def complete_line(line: str, word: str, commands: Iterable[str]) -> list[str]:
    """Return the possible completions of the last word of a line: commands, or file names after a command."""
    if not line.startswith("/"):
        return []
    if " " not in line:
        return [f"{name} " for name in commands if name.startswith(word)]
    pattern = glob.escape(os.path.expanduser(word)) + "*"
    return [path + "/" if os.path.isdir(path) else path for path in sorted(glob.glob(pattern))]
