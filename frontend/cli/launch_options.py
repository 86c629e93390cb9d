"""The options of `engine serve` that are not part of the engine's configuration, because they concern one machine."""

from typing import Annotated

import msgspec

from ...protocol.config.option import option
from ...protocol.config.parallel import machines


class LaunchOptions(msgspec.Struct, frozen=True):
    """The options that only the `engine serve` process of this machine uses."""

    config: Annotated[
        str | None,
        option(
            "YAML file with options; flags and environment variables take precedence",
            metavar="FILE",
        ),
    ] = None
    node_rank: Annotated[
        int,
        machines(
            "Rank of this machine; 0 serves the API, others need --headless", "-r", ge=0, le=1023
        ),
    ] = 0
    headless: Annotated[
        bool, machines("Run only workers on this machine, for node ranks above 0")
    ] = False
