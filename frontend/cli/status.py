"""`engine status`: show a live table of an engine's processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

from ...protocol.errors import ConfigError
from .arguments import read_variables

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 5.0

COLUMNS: Final = (
    ("PROCESS", "{name}"),
    ("PID", "{pid}"),
    ("STAGE", "{stage}"),
    ("EPOCH", "{epoch}"),
    ("RESTARTS", "{num_restarts}"),
    ("SILENT", "{silent_s:.1f} s"),
    ("STEPS/S", "{steps_per_s:.1f}"),
    ("RUNNING", "{num_running}"),
    ("WAITING", "{num_waiting}"),
    ("KV USE", "{kv_cache_usage:.0%}"),
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine status`."""
    parser = argparse.ArgumentParser(
        prog="engine status", description="Show a live table of a running engine's processes."
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", help="API key; $ENGINE_ADMIN_API_KEY or $ENGINE_API_KEY if not given"
    )
    parser.add_argument("--once", action="store_true", help="Print the table once and exit")
    return parser


def status(argv: Sequence[str]) -> int:
    """Print the table every second until interrupted. Return 0, or 1 if the server does not answer."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    try:
        api_key = parsed.api_key or read_variables("frontend.admin_api_key", os.environ)
        api_key = api_key or next(iter(read_variables("frontend.api_keys", os.environ) or ()), None)
        while True:
            table = format_table(_fetch(parsed.url, api_key))
            if parsed.once:
                print(table)
                return 0
            print(f"\x1b[H\x1b[2J{table}", flush=True)
            time.sleep(INTERVAL_S)
    except (OSError, ValueError, ConfigError) as error:
        is_refused = isinstance(error, urllib.error.HTTPError) and error.code == 401
        remedy = "; pass a valid API key with --api-key" if is_refused else ""
        print(
            f"engine: error: cannot read the status of {parsed.url}: {error}{remedy}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 0


def _fetch(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/engine/status", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def format_table(answer: dict[str, Any]) -> str:
    """Return the table with one line per process, and a last line with the engine's problem if there is one."""
    rows = [[title for title, _ in COLUMNS]]
    rows += [[cell.format(**process) for _, cell in COLUMNS] for process in answer["processes"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if answer["trouble"]:
        lines.append(answer["trouble"])
    return "\n".join(lines)
