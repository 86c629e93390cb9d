"""The command `engine models`: list the models in the caches of this machine, and remove some."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from ....protocol.errors import ConfigError
from ...supervisor.console import format_bytes, reports_errors
from ..parsers import add_switch, command_parser
from .caches import CachedModel, find_by_name, find_cached, remove_cached

_DAY_S: Final = 86400


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine models`."""
    parser = command_parser(
        "models",
        "List the models in the caches of this machine: the Hugging Face client's, "
        "Engine's own, and installed packages.",
        "[--json] | engine models rm NAME... [--yes]",
    )
    add_switch(parser, "--json", "Print one JSON object per model")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    remove = commands.add_parser(
        "rm", help="Remove models from the caches", description="Remove models."
    )
    remove.add_argument(
        "names", metavar="NAME", nargs="+", help="Model names, as engine models prints them"
    )
    add_switch(remove, "-y --yes", "Remove without asking for confirmation")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """List or remove models. Return 0, or 1 after a failure."""
    parsed = make_parser().parse_args(argv)
    models = find_cached()
    if parsed.command == "rm":
        _remove(models, parsed.names, parsed.yes)
    elif parsed.json:
        for model in models:
            print(json.dumps(msgspec.to_builtins(model)))
    else:
        print(format_models(models))
    return 0


def format_models(models: Sequence[CachedModel]) -> str:
    """Return a table of the models and their total size."""
    rows = [("NAME", "CACHE", "SIZE", "LAST READ")]
    for model in models:
        age = max(0.0, time.time() - model.used_at) // _DAY_S
        read = "today" if not age else f"{age:.0f} days ago"
        rows.append((model.name, model.kind, format_bytes(model.size_bytes), read))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    total = format_bytes(sum(model.size_bytes for model in models))
    return "\n".join([*lines, f"{len(models)} in all, {total}"])


def _remove(models: list[CachedModel], names: Sequence[str], is_sure: bool) -> None:
    chosen = [find_by_name(models, name) for name in dict.fromkeys(names)]
    if not is_sure:
        print(format_models(chosen))
        if not sys.stdin.isatty():
            raise ConfigError(
                "nothing was removed, because there is no terminal to ask for confirmation; pass --yes"
            )
        if input("Remove? [y/N] ").strip().lower() not in ("y", "yes"):
            return
    for model in chosen:
        remove_cached(model)
        print(f"removed {model.name}, {format_bytes(model.size_bytes)}")
