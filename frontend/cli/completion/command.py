"""The command `engine completion`: print a script with which a shell completes commands and flags of `engine`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from ..parsers import command_parser

SHELLS: Final = ("bash", "zsh", "fish")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine completion`."""
    parser = command_parser(
        "completion",
        "Print a shell script that completes engine's commands and flags. Store it where the shell "
        "looks for such scripts: for bash ~/.local/share/bash-completion/completions/engine, for zsh a "
        "file _engine in a directory of $fpath, for fish ~/.config/fish/completions/engine.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, help="Shell that the script is for")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the script and return 0."""
    shell = make_parser().parse_args(argv).shell
    # A late import, because it imports the modules of all commands.
    from .shells import SCRIPTS
    from .tree import read_commands

    print(SCRIPTS[shell](read_commands()), end="")
    return 0
