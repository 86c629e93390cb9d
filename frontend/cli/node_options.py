"""The options that differ between machines."""

from __future__ import annotations

import msgspec


class NodeOptions(msgspec.Struct, frozen=True):
    """The rank of this machine, and whether it runs only workers (`headless`)."""

    node_rank: int = 0
    headless: bool = False
