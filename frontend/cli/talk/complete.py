"""The command `engine complete`: continue a text, with or without a running server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing

from ....protocol.errors import EngineError
from ...supervisor.console import reports_errors
from ..parsers import add_option, add_switch, command_parser
from ..remote.target import Target, add_target_arguments, open_target
from .sampling import add_sampling_arguments, sampling_fields


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine complete`, without the flags of `engine serve`."""
    parser = command_parser(
        "complete",
        "Continue a text, by default from standard input. --url can be any server with an "
        "OpenAI-compatible API. With --model and without --url, a server is started, and all flags of "
        "engine serve are accepted.",
        "[PROMPT] [--url URL] [--model MODEL] [flags]",
        takes_serve_flags=True,
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        default="-",
        help="Text to continue; - is standard input",
    )
    about = "Model to serve, or model name on the server at --url"
    add_option(parser, "--model", about, "MODEL")
    add_target_arguments(parser)
    add_switch(parser, "--echo", "Print the prompt before its continuation")
    add_switch(parser, "--json", "Print the server's complete response as JSON at the end")
    add_sampling_arguments(parser)
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the continuation. Return 1 after a failure; invalid arguments exit with code 2."""
    parser = make_parser()
    parsed, flags = parser.parse_known_args(argv)
    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    if not prompt:
        raise EngineError("the prompt is empty; pass a text as PROMPT or on standard input")
    named = [] if parsed.model is None else ["--model", parsed.model]
    with open_target(parser, parsed, [*named, *flags]) as target:
        _complete(target, prompt, parsed)
    return 0


def _complete(target: Target, prompt: str, parsed: argparse.Namespace) -> None:
    body = {"model": target.model, "prompt": prompt, "echo": parsed.echo, **sampling_fields(parsed)}
    if parsed.json:
        print(json.dumps(target.server.call("/v1/completions", body)))
        return
    with closing(target.server.stream("/v1/completions", body)) as events:
        for event in events:
            for choice in event.get("choices") or ():
                sys.stdout.write(choice.get("text") or "")
                sys.stdout.flush()
    sys.stdout.write("\n")
