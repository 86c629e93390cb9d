"""The arguments of `engine chat` and `engine complete` that control how tokens are drawn."""

from __future__ import annotations

import argparse
from typing import Any


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. Those that are not given are left to the server."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 always takes the most probable token"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="Draw from the most probable tokens of this share"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="Maximum tokens of an answer (default: no limit)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="Make the same draws again")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="End the answer at this text; repeatable"
    )


def sampling_fields(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request for the arguments that are given."""
    names = ("temperature", "top_p", "max_tokens", "seed", "stop")
    values = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
