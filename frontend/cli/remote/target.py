"""The arguments that choose a server and a model: a running server, or one of the command's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .own_server import own_server
from .server import DEFAULT_URL, RemoteServer, find_api_key


class Target(NamedTuple):
    """A server, and the name of the model to ask on it."""

    server: RemoteServer
    model: str


def add_target_arguments(parser: argparse.ArgumentParser, *, has_position: bool = True) -> None:
    """Add `--url`, `--model` and `--api-key` and, if `has_position`, the positional MODEL."""
    if has_position:
        parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="Same as --model")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Model to serve, or name of a model of --url (default: the first that it lists)",
    )
    parser.add_argument(
        "--url",
        "--base-url",
        help=f"Server with OpenAI's API (default: {DEFAULT_URL}, unless a model is given)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key; $OPENAI_API_KEY or $ENGINE_API_KEY if not given"
    )


def given_model(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> str | None:
    """Return the model of the arguments, or None. Two different ones end the program with exit code 2."""
    positional: str | None = getattr(parsed, "positional_model", None)
    named: str | None = parsed.model
    if positional is not None and named is not None and positional != named:
        parser.error(f"two models given: {positional!r} and --model {named!r}; give only one")
    return named if positional is None else positional


@contextmanager
def open_target(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, serve_flags: Sequence[str]
) -> Iterator[Target]:
    """Yield the server and the model that the arguments name. Start a server if they name none but a model.

    Raises:
        EngineError: The server cannot be reached, or does not start.
    """
    model = given_model(parser, parsed)
    if parsed.url is not None and serve_flags:
        parser.error(f"{serve_flags[0]} has no effect with --url")
    if parsed.url is None and (model is not None or serve_flags):
        flags = [*serve_flags] if model is None else [model, *serve_flags]
        with own_server(flags) as server:
            yield Target(server, server.first_model())
        return
    server = RemoteServer(parsed.url or DEFAULT_URL, find_api_key(parsed.api_key))
    yield Target(server, model or server.first_model())
