"""Read the deadline and the W3C trace context of a request from its headers."""

from __future__ import annotations

import math
import re
import time
from typing import Final

from starlette.types import Scope

from .errors import wrong

MAX_TRACE_STATE: Final = 512
"""Maximum bytes of `tracestate`. The specification allows servers to drop longer ones."""

_TRACE_PARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACE_STATE: Final = re.compile(rb"[\x20-\x7e\t]*")


def read_deadline(scope: Scope, default_s: float) -> float:
    """Return the deadline in CLOCK_MONOTONIC seconds, from the header or else `default_s`; 0.0 for none.

    Raises:
        APIError: The header is not a positive number of seconds (400).
    """
    seconds = default_s
    for name, value in scope["headers"]:
        if name == b"x-request-timeout":
            seconds = _parse_timeout(value.decode("latin-1"))
    return time.monotonic() + seconds if seconds else 0.0


def _parse_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise wrong("X-Request-Timeout", "a number of seconds greater than 0", text)
    return seconds


def read_trace_headers(scope: Scope) -> dict[str, str] | None:
    """Return `traceparent` and `tracestate`, or None without a valid `traceparent`.

    They name the server's own span if the request is traced, otherwise the client's span. Invalid values are dropped,
    because a request must not fail for its trace.
    """
    own: dict[str, str] | None = scope.get("state", {}).get("trace_headers")
    if own is not None:
        return own
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parents.append(value.strip())
        elif name == b"tracestate":
            states.append(value.strip())
    if len(parents) != 1 or not _TRACE_PARENT.fullmatch(parents[0]):
        return None
    headers = {"traceparent": parents[0].decode("ascii")}
    state = b",".join(filter(None, states))
    if state and len(state) <= MAX_TRACE_STATE and _TRACE_STATE.fullmatch(state):
        headers["tracestate"] = state.decode("ascii")
    return headers
