"""The limits after which a process counts as hung, and after which the engine stops restarting it."""

from typing import Annotated

import msgspec

from .option import option


class RecoveryConfig(msgspec.Struct, frozen=True):
    """The limits after which a process counts as hung, the number of its restarts, and when an idle server sleeps.

    A crash is unexplained if no token was produced and no cause was found since the previous one.
    """

    heartbeat_timeout_s: Annotated[
        float, option("Seconds without a heartbeat before a process is killed and restarted", ge=1)
    ] = 5.0
    step_timeout_s: Annotated[
        float, option("Maximum seconds of a step before its worker is restarted", ge=1)
    ] = 300.0
    max_restarts: Annotated[
        int,
        option(
            "Consecutive unexplained crashes allowed before exit, unless another replica serves",
            ge=0,
        ),
    ] = 10
    sleep_idle_s: (
        Annotated[
            float,
            option(
                "Idle seconds before the model is unloaded until the next request",
                "--sleep-idle-seconds",
                parse="idle_time",
                default_text="never",
                ge=0,
            ),
        ]
        | None
    ) = None
    inject_crash: (
        Annotated[
            int, option("For tests: crash the worker when a prompt contains this token", ge=0)
        ]
        | None
    ) = None
