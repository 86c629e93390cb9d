"""Until when an answer is worth anything to its client."""

from __future__ import annotations

import math
import time

from starlette.types import Scope

from .errors import bad_request, echo

HEADER = "X-Request-Timeout"


def read_deadline(scope: Scope, default_s: float) -> float:
    """CLOCK_MONOTONIC seconds: so long after now as the header or else the default says; 0.0 for never.

    Raises APIError 400 for a header that is no positive number of seconds.
    """
    seconds = default_s
    for name, value in scope["headers"]:
        if name == b"x-request-timeout":
            seconds = _parse(value.decode("latin-1"))
    return time.monotonic() + seconds if seconds else 0.0


def _parse(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise bad_request(
            HEADER, f"{HEADER} must be a number of seconds greater than 0, got {echo(text)}"
        )
    return seconds
