"""`engine embed`: embed the lines of a file or of standard input, without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import IO, Final

import msgspec

from ...protocol.errors import EngineError
from ..cli.arguments import parse_settings
from ..supervisor.console import Console
from .llm import DEFAULTS, LLM

TEXTS_AT_A_TIME: Final = 1024
"""Vectors are written before the next texts are read, so that a file may have any size."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine embed`, without the flags of `engine serve`."""
    parser = argparse.ArgumentParser(
        prog="engine embed",
        usage="engine embed [MODEL] [--input FILE] [flags]",
        description="Embed each line of a file. The output has a line of JSON with the index and the vector of each. "
        "The flags of engine serve apply as well.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        default="-",
        help="Text file; - is standard input (default: -)",
    )
    parser.add_argument(
        "--dimensions",
        type=int,
        metavar="N",
        help="Keep only the first elements of each vector (default: all)",
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="The model's prompt to put before every text (default: that of the model)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write a line of JSON for each text. Return 1 after a failure; invalid arguments exit with code 2."""
    parser = make_parser()
    own, flags = parser.parse_known_args(argv)
    defaults = (
        f"--no-{name}" if value is False else f"--{name}={value}"
        for name, value in DEFAULTS.items()
    )
    settings = parse_settings([*defaults, *flags])
    try:
        with ExitStack() as stack:
            lines = sys.stdin
            if own.input != "-":
                lines = stack.enter_context(open(own.input, encoding="utf-8"))
            llm = stack.enter_context(LLM.from_settings(settings))
            _embed(llm, lines, own.dimensions, own.prompt_name)
    except BrokenPipeError:
        return 0
    except (EngineError, OSError, UnicodeDecodeError) as error:
        Console().error(str(error))
        return 1
    return 0


def _embed(llm: LLM, lines: IO[str], dimensions: int | None, prompt_name: str | None) -> None:
    index = 0
    while texts := [line.rstrip("\n") for line in islice(lines, TEXTS_AT_A_TIME)]:
        for output in llm.embed(texts, dimensions=dimensions, prompt_name=prompt_name):
            entry = {"index": index, "embedding": output.outputs.embedding}
            sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
            index += 1
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
