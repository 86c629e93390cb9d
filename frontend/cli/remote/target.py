"""The arguments that choose the server and model of a command: a running server, or one that the command starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..arguments import parse_settings
from ..parsers import add_option
from .own_server import own_server
from .server import DEFAULT_URL, RemoteServer, find_api_key, find_operator_key


class Target(NamedTuple):
    """A server, and the name of the model to use on it."""

    server: RemoteServer
    model: str


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and `--api-key`. The model and the flags of `engine serve` are left unparsed."""
    about = (
        f"Server with an OpenAI-compatible API (default: {DEFAULT_URL}, unless a model is given)"
    )
    add_option(parser, "--url --base-url", about)
    about = "API key; $OPENAI_API_KEY or $ENGINE_API_KEY if not given"
    add_option(parser, "--api-key", about, "KEY")


def add_operator_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the `--url` and `--api-key` of a command for operators of a running server."""
    add_option(parser, "--url", "URL of the server", default=DEFAULT_URL)
    about = "API key; $ENGINE_ADMIN_API_KEY or $ENGINE_API_KEY if not given"
    add_option(parser, "--api-key", about, "KEY")


def open_server(parsed: argparse.Namespace) -> RemoteServer:
    """Return the server that the arguments of `add_operator_arguments` name.

    Raises:
        EngineError: The URL or an environment variable is invalid.
    """
    return RemoteServer(parsed.url, find_operator_key(parsed.api_key))


@contextmanager
def open_target(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, arguments: Sequence[str]
) -> Iterator[Target]:
    """Yield the server and the model that the arguments name.

    Args:
        parser: The parser of the command.
        parsed: The parsed arguments, including those of `add_target_arguments`.
        arguments: The unparsed arguments: a model, and flags of `engine serve` if a server should be started.

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
