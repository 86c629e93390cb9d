"""`engine keygen`: create the key that the machines of one engine share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...protocol.cluster_key import ClusterKey
from ..supervisor.console import reports_errors
from .parsers import add_option, command_parser


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine keygen`."""
    parser = command_parser(
        "keygen",
        "Create the key that authenticates the machines of one engine to each other. Copy it to every machine.",
    )
    add_option(
        parser, "--out", "File to write; - is standard output", "FILE", default="cluster.key"
    )
    return parser


@reports_errors
def keygen(argv: Sequence[str]) -> int:
    """Write a new key. Return 1 if the file already exists."""
    parser = make_parser()
    out = parser.parse_args(argv).out
    key = ClusterKey.generate()
    if out == "-":
        sys.stdout.write(key.encode().decode())
        return 0
    key.save(out)
    print(out)
    return 0
