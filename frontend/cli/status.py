"""The command `engine status`: show a live table of an engine's processes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from ..supervisor.console import reports_errors
from .parsers import add_switch, command_parser
from .remote.target import add_operator_arguments, open_server

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 5.0

COLUMNS: Final = (
    ("PROCESS", "{name}"),
    ("PID", "{pid}"),
    ("STAGE", "{stage}"),
    ("RESTARTS", "{num_restarts}"),
    ("SILENT", "{silent_s:.1f} s"),
    ("STEPS/S", "{steps_per_s:.1f}"),
    ("RUNNING", "{num_running}"),
    ("WAITING", "{num_waiting}"),
    ("KV", "{kv_cache_usage:.0%}"),
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine status`."""
    parser = command_parser("status", "Show a live table of a running engine's processes.")
    add_operator_arguments(parser)
    about = "Print the table once and exit; the default if the output is not a terminal"
    add_switch(parser, "--once", about)
    add_switch(parser, "--json", "Print one JSON object per line instead of a table")
    return parser


@reports_errors
def status(argv: Sequence[str]) -> int:
    """Print the table every second until interrupted. Return 0, or 1 if the server does not answer."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    once = parsed.once or not (parsed.json or sys.stdout.isatty())
    try:
        server = open_server(parsed)
        while True:
            answer = server.call("/engine/status", timeout_s=TIMEOUT_S)
            if parsed.json:
                print(json.dumps(answer), flush=True)
            elif once:
                print(format_table(answer))
            else:
                print(f"\x1b[H\x1b[2J{format_table(answer)}", flush=True)
            if once:
                return 0
            time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return 0


def format_table(answer: dict[str, Any]) -> str:
    """Return the table with one line per process, followed by the engine's current problem if it has one."""
    rows = [[title for title, _ in COLUMNS]]
    rows += [[cell.format(**process) for _, cell in COLUMNS] for process in answer["processes"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if answer["trouble"]:
        lines.append(answer["trouble"])
    return "\n".join(lines)
