"""The arguments that choose a server and a model: a running server, or one of the command's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..arguments import parse_settings
from .own_server import own_server
from .server import DEFAULT_URL, RemoteServer, find_api_key


class Target(NamedTuple):
    """A server, and the name of the model to ask on it."""

    server: RemoteServer
    model: str


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and `--api-key`. The model and flags of `engine serve` are what the parser does not have."""
    parser.add_argument(
        "--url",
        "--base-url",
        help=f"Server with OpenAI's API (default: {DEFAULT_URL}, unless a model is given)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key; $OPENAI_API_KEY or $ENGINE_API_KEY if not given"
    )


@contextmanager
def open_target(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, arguments: Sequence[str]
) -> Iterator[Target]:
    """Yield the server and the model that the arguments name.

    Args:
        parser: The parser of the command.
        parsed: What it has parsed, with `add_target_arguments`.
        arguments: What it has not: a model, which `--url` serves or a server is started for, and flags of that.

    Raises:
        EngineError: The server cannot be reached, or does not start.
    """
    if parsed.url is None and arguments:
        with own_server(arguments) as server:
            yield Target(server, server.first_model())
        return
    settings = parse_settings(arguments, {})
    model = settings["model"].pop("model", None)
    for section in settings.values():
        for name in section:
            parser.error(f"--{name.replace('_', '-')} has no effect with --url")
    server = RemoteServer(parsed.url or DEFAULT_URL, find_api_key(parsed.api_key))
    yield Target(server, model or server.first_model())
