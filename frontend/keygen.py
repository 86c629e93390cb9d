"""`engine keygen`: the key that the machines of one engine share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..protocol.cluster_key import ClusterKey
from ..protocol.errors import ConfigError
from .console import Console


def keygen(argv: Sequence[str]) -> int:
    """Write a new key. Returns 1 if there is a file already."""
    parser = argparse.ArgumentParser(
        prog="engine keygen",
        description="Make the key by which the machines of one engine know each other; copy it to all of them.",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="cluster.key",
        help="(default: cluster.key; - is standard output)",
    )
    out = parser.parse_args(argv).out
    key = ClusterKey.generate()
    if out == "-":
        sys.stdout.write(key.encode().decode())
        return 0
    try:
        key.save(out)
    except ConfigError as error:
        Console().error(str(error))
        return 1
    print(out)
    return 0
