"""The arguments of `engine chat` and `engine complete` that set sampling parameters."""

from __future__ import annotations

import argparse
from typing import Any

from ..parsers import add_option


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. The server's defaults apply to arguments that are not given."""
    group = parser.add_argument_group("sampling")
    about = "Sampling temperature; 0 always takes the most probable token"
    add_option(group, "--temperature", about, "T", float)
    about = "Sample from the most probable tokens up to this total probability"
    add_option(group, "--top-p", about, "P", float)
    add_option(group, "--max-tokens", "Maximum tokens per answer (default: no limit)", "N", int)
    add_option(group, "--seed", "Seed for repeatable sampling", "N", int)
    about = "End the answer at this text; may be repeated"
    add_option(group, "--stop", about, "TEXT", action="append")


def sampling_fields(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments as fields of a request."""
    names = ("temperature", "top_p", "max_tokens", "seed", "stop")
    values = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
