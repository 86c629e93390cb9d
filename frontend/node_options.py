"""The options that differ from machine to machine."""

from __future__ import annotations

import msgspec


class NodeOptions(msgspec.Struct, frozen=True):
    """Its place among the machines; with `headless` it has workers only."""

    node_rank: int = 0
    headless: bool = False
