"""The arguments of `engine chat` and `engine complete` that set sampling parameters."""

from __future__ import annotations

import argparse
from typing import Any


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. The server's defaults apply to arguments that are not given."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="Sampling temperature; 0 always takes the most probable token",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="Sample from the most probable tokens up to this total probability",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="Maximum tokens per answer (default: no limit)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="Seed for repeatable sampling")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="End the answer at this text; may be repeated",
    )


def sampling_fields(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments as fields of a request."""
    names = ("temperature", "top_p", "max_tokens", "seed", "stop")
    values = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
