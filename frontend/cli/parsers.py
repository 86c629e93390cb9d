"""The parsers of commands, and the two kinds of arguments that most of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def command_parser(
    name: str,
    description: str,
    usage: str = "",
    *,
    epilog: str | None = None,
    takes_serve_flags: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of `engine NAME`, still without arguments.

    If the flags of `engine serve` apply to the command as well, no flag may be abbreviated.
    """
    return argparse.ArgumentParser(
        prog=f"engine {name}",
        usage=f"engine {name} {usage}" if usage else None,
        description=description,
        epilog=epilog,
        allow_abbrev=not takes_serve_flags,
    )


def add_switch(group: argparse._ActionsContainer, flags: str, summary: str) -> None:
    """Add an argument without a value. `flags` are its names, separated by spaces."""
    group.add_argument(*flags.split(), action="store_true", help=summary)


def add_option(
    group: argparse._ActionsContainer,
    flags: str,
    summary: str,
    metavar: str | None = None,
    parse: Callable[[str], Any] = str,
    default: Any = None,
    **settings: Any,
) -> None:
    """Add an argument with a value. Its help ends with the default, unless `summary` describes that.

    Args:
        group: The parser or the group.
        flags: The names of the argument, separated by spaces.
        summary: The purpose of the argument.
        metavar: The placeholder for the value in help.
        parse: Returns the value for a text.
        default: The value if the argument is not given.
        settings: Further settings of `argparse`.
    """
    shown = f"{default:g}" if isinstance(default, float) else default
    if shown not in (None, "", []) and "(default: " not in summary:
        summary += f" (default: {shown})"
    group.add_argument(
        *flags.split(), type=parse, default=default, metavar=metavar, help=summary, **settings
    )
