"""The command `engine embed`: embed the lines of a file or of standard input, with or without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import IO, Final, TypeAlias

import msgspec

from ..cli.parsers import add_option, command_parser
from ..cli.remote.target import Target, open_target
from ..supervisor.console import reports_errors
from .llm import LLM

Embed: TypeAlias = Callable[[list[str], int | None, str | None], Iterable[list[float]]]
"""Function from texts, a number of dimensions and the name of a prompt to the vectors of the texts."""

TEXTS_A_REQUEST: Final = 64
TEXTS_AT_A_TIME: Final = 1024
"""Number of texts whose vectors are written before the next ones are read, so that a file may have any size."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine embed`, without the flags of `engine serve`."""
    parser = command_parser(
        "embed",
        "Embed each line of a file. The output has one JSON object per line, with the text's index and "
        "vector. --url can be any server with an OpenAI-compatible API; without it, all flags of "
        "engine serve are accepted.",
        "[MODEL] [--input FILE] [--url URL] [flags]",
        takes_serve_flags=True,
    )
    add_option(parser, "--input", "Text file; - is standard input", "FILE", default="-")
    about = "Number of elements to keep of each vector (default: all)"
    add_option(parser, "--dimensions", about, "N", int)
    about = (
        "Name of the model's prompt to prepend to each text (default: the model's default prompt)"
    )
    add_option(parser, "--prompt-name", about, "NAME")
    add_option(parser, "--url", "URL of a server to use (default: start an engine)")
    about = "API key for --url; $OPENAI_API_KEY or $ENGINE_API_KEY if not given"
    add_option(parser, "--api-key", about, "KEY")
    return parser


@reports_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write a line of JSON for each text. Return 1 after a failure; invalid arguments exit with code 2."""
    parser = make_parser()
    own, flags = parser.parse_known_args(argv)
    if own.api_key is not None and own.url is None:
        flags += ["--api-key", own.api_key]
    with ExitStack() as stack:
        lines = sys.stdin
        if own.input != "-":
            lines = stack.enter_context(open(own.input, encoding="utf-8"))
        embed: Embed
        if own.url is None:
            llm = stack.enter_context(LLM.from_flags(flags))
            embed = partial(_embed_here, llm)
        else:
            embed = partial(_embed_there, stack.enter_context(open_target(parser, own, flags)))
        _write_all(embed, lines, own.dimensions, own.prompt_name)
    return 0


def _embed_here(
    llm: LLM, texts: list[str], dimensions: int | None, prompt_name: str | None
) -> Iterable[list[float]]:
    outputs = llm.embed(texts, dimensions=dimensions, prompt_name=prompt_name)
    return (output.outputs.embedding for output in outputs)


def _embed_there(
    target: Target, texts: list[str], dimensions: int | None, prompt_name: str | None
) -> Iterator[list[float]]:
    """Yield the vectors that a server computes.

    Raises:
        ServerError: The server cannot be reached, or answers with an error.
    """
    optional = {"dimensions": dimensions, "prompt_name": prompt_name}
    fields = {name: value for name, value in optional.items() if value is not None}
    for start in range(0, len(texts), TEXTS_A_REQUEST):
        body = {"model": target.model, "input": texts[start : start + TEXTS_A_REQUEST], **fields}
        answer = target.server.call("/v1/embeddings", body)
        for entry in sorted(answer["data"], key=itemgetter("index")):
            yield entry["embedding"]


def _write_all(
    embed: Embed,
    lines: IO[str],
    dimensions: int | None,
    prompt_name: str | None,
) -> None:
    index = 0
    while texts := [line.rstrip("\n") for line in islice(lines, TEXTS_AT_A_TIME)]:
        for vector in embed(texts, dimensions, prompt_name):
            entry = {"index": index, "embedding": vector}
            sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
            index += 1
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
