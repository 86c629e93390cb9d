"""The W3C trace context of a request: its trace, and its own span."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, NamedTuple

SAMPLED: Final = 1
"""The flag of traces that are recorded."""


class TraceContext(NamedTuple):
    """A span of a trace.

    Attributes:
        trace_id: The ID of the trace, 128 bits.
        span_id: The ID of the span, 64 bits.
        flags: The flags of `traceparent`.
        state: `tracestate`; "" for none.
    """

    trace_id: int
    span_id: int
    flags: int = SAMPLED
    state: str = ""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext:
        """Return the context of a valid `traceparent` and its `tracestate`."""
        _, trace_id, span_id, flags = headers["traceparent"].split("-")[:4]
        state = headers.get("tracestate", "")
        return cls(int(trace_id, 16), int(span_id, 16), int(flags, 16), state)

    @classmethod
    def new_trace(cls) -> TraceContext:
        """Return the context of the first span of a new trace."""
        return cls(random.getrandbits(128) or 1, new_span_id())

    def new_child(self) -> TraceContext:
        """Return the context of another span of the trace."""
        return self._replace(span_id=new_span_id())

    @property
    def parent_header(self) -> str:
        """The header `traceparent` for calls that this span makes."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers `traceparent` and `tracestate` for calls that this span makes."""
        headers = {"traceparent": self.parent_header}
        if self.state:
            headers["tracestate"] = self.state
        return headers


def new_span_id() -> int:
    """Return the ID of a new span."""
    return random.getrandbits(64) or 1
