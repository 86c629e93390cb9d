"""The command `engine why`: explain what happened to a request of a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from ..supervisor.console import reports_errors
from .parsers import add_switch, command_parser
from .remote.target import add_operator_arguments, open_server

TIMEOUT_S: Final = 120.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine why`."""
    parser = command_parser(
        "why",
        "Explain what happened to a request: how long it waited, what it waited for, and "
        "where its time went. The server needs --dump-dir.",
    )
    parser.add_argument(
        "id", metavar="ID", help="The x-request-id of the response, or a prefix of it"
    )
    add_operator_arguments(parser)
    add_switch(parser, "--json", "Print the answer as JSON")
    return parser


@reports_errors
def why(argv: Sequence[str]) -> int:
    """Print the timeline of a request. Return 0, or 1 if the server has no record of the request."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    path = f"/debug/requests/{quote(parsed.id, safe='')}"
    answer = open_server(parsed).call(path, timeout_s=TIMEOUT_S)
    print(json.dumps(answer) if parsed.json else "\n".join(answer["timelines"]).rstrip())
    return 0
