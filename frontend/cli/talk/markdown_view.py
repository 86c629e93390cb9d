"""Render the Markdown of an answer on a terminal while it arrives."""

from __future__ import annotations

from typing import Self

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from .answer import Piece

REFRESHES_PER_S = 12
_BLANK_ROWS = 2
"""Terminal rows that an unfinished block leaves free, so that the screen does not scroll while it is redrawn."""


class MarkdownView:
    """Renders Markdown on a terminal.

    A block (a paragraph, list, table or code block) is redrawn in place while it grows, and is final once the next
    block begins. So the cost of redrawing does not grow with the answer, and an answer may be longer than the screen.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._is_reasoning = False
        self._live = Live(
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            get_renderable=self._unfinished,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        text, self._text = self._text, ""
        self._live.stop()
        self._print(text)

    def show(self, piece: Piece) -> None:
        """Render the next piece of the answer."""
        if piece.is_reasoning != self._is_reasoning:
            finished, self._text = self._text, ""
            self._print(finished)
            self._is_reasoning = piece.is_reasoning
        text = self._text + piece.text
        finished, self._text = ("", text) if self._is_reasoning else split_finished(text)
        self._print(finished)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(self._render(text))
            self._console.print()

    def _render(self, text: str) -> Markdown | Text:
        if self._is_reasoning:
            return Text(text.strip(), style="dim italic")
        return Markdown(text)

    def _unfinished(self) -> _Tail:
        return _Tail(self._render(self._text))


class _Tail:
    """The last lines of a renderable that fit on the terminal."""

    def __init__(self, content: Markdown | Text) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - _BLANK_ROWS) :]:
            yield from line
            yield Segment.line()


_PARSER = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def split_finished(text: str) -> tuple[str, str]:
    """Split Markdown before its last block. Only the last block can still change when more text arrives.

    Returns:
        The finished blocks, which may be empty, and the last one.
    """
    starts = [
        token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map is not None
    ]
    if not starts or starts[-1] == 0:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])
