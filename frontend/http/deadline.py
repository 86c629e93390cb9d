"""Read the deadline of a request from its header."""

from __future__ import annotations

import math
import time

from starlette.types import Scope

from .errors import wrong

HEADER = "X-Request-Timeout"


def read_deadline(scope: Scope, default_s: float) -> float:
    """Return the deadline in CLOCK_MONOTONIC seconds, from the header or else `default_s`; 0.0 for none.

    Raises:
        APIError: The header is not a positive number of seconds (400).
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
        raise wrong(HEADER, "a number of seconds greater than 0", text)
    return seconds
