import io
import re

import pytest
from engine.frontend.supervisor.console import Console, StartupProgress, format_bytes
from engine.protocol.supervisor_messages import ProcessStatus, Stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    """Return the written lines without their time stamps."""
    return [re.sub(r"^\[ *\d+\.\d\d s\] ", "", line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (5.4e11, "540 GB")],
)
def test_byte_counts_are_formatted_with_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_transfer_without_terminal_prints_first_and_last_line() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for done in range(0, 101, 10):
        console.progress("loading", done * 1000, 100_000)
    console.line("done")
    assert lines(stream) == [
        "loading    0%  0 B of 100 kB",
        "loading  100%  100 kB of 100 kB",
        "done",
    ]
    assert "\x1b" not in stream.getvalue()


def test_transfer_on_terminal_redraws_one_line() -> None:
    stream = Terminal()
    console = Console(stream)
    for done in (0, 50, 100):
        console.progress("loading", done, 100)
    console.line("done")
    drawn, last = stream.getvalue().split("\n")[:2]
    assert drawn.count("\r") >= 2
    assert "░" * 24 in drawn.split("\r")[1]
    assert "█" * 24 in drawn.split("\r")[-1]
    assert last.endswith("done")


def test_error_line_does_not_overwrite_an_unfinished_progress_bar() -> None:
    stream = Terminal()
    console = Console(stream)
    console.progress("loading", 1, 100)
    console.error("the disk is full")
    assert stream.getvalue().endswith("\x1b[K\nengine: error: the disk is full\n")


def test_closed_terminal_is_ignored() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    Console(Gone()).line("ready")


def test_reports_of_many_processes_make_one_line_per_stage() -> None:
    stream = io.StringIO()
    progress = StartupProgress(Console(stream))
    for done in (0, 30, 60):
        for worker in ("worker 0", "worker 1"):
            progress.update(ProcessStatus(worker, Stage.LOADING, done=done, total=60))
    for worker in ("worker 0", "worker 1"):
        progress.update(ProcessStatus(worker, Stage.WARMING, "96 blocks"))
    assert lines(stream) == [
        "loading weights    0%  0 B of 60 B",
        "loading weights  100%  120 B of 120 B",
        "warming up  96 blocks",
    ]
