"""Decide which requests are traced, and begin and resume their traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....protocol.config import EngineConfig
from .context import SAMPLED, TraceContext
from .request_trace import RequestTrace

if TYPE_CHECKING:
    from .otlp import OTLPExporter


class Tracer:
    """Begins the traces of requests."""

    def __init__(self, exporter: OTLPExporter) -> None:
        self._exporter = exporter

    def begin(self, method: str, headers: Mapping[str, str] | None) -> RequestTrace:
        """Return the trace of a request, below the client's span if it sent a valid context; None if not traced."""
        parent = None if headers is None else TraceContext.from_headers(headers)
        context = TraceContext.new_trace() if parent is None else parent.new_child()
        is_sampled = self._exporter.should_sample(context, parent)
        context = context._replace(flags=context.flags & ~SAMPLED | is_sampled)
        parent_id = 0 if parent is None else parent.span_id
        return RequestTrace(context, self._exporter.export, parent_id, method)

    def resume(
        self, headers: Mapping[str, str] | None, path: str, request_id: str
    ) -> RequestTrace | None:
        """Return the trace of a request that another frontend began with this context; None if it was not traced."""
        if headers is None:
            return None
        context = TraceContext.from_headers(headers)
        return RequestTrace(
            context, self._exporter.export, path=path, request_id=request_id, num_unfinished=0
        )

    def close(self) -> None:
        """Send all traces that have ended."""
        self._exporter.close()


def make_tracer(config: EngineConfig, client_index: int) -> Tracer | None:
    """Return the tracer of a frontend; None without an endpoint for traces."""
    if not config.frontend.otlp_traces_endpoint:
        return None
    # OpenTelemetry's packages are an optional extra, and importing them takes a tenth of a second.
    from .otlp import OTLPExporter

    return Tracer(OTLPExporter(config, client_index))
