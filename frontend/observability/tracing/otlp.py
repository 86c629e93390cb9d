"""Send traces by OTLP, with OpenTelemetry's SDK. Importing this module needs the extra `otel`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, set_span_in_context

from .... import __version__
from ....protocol.config import EngineConfig
from ....protocol.errors import ConfigError
from .context import TraceContext
from .request_trace import RequestTrace
from .spans import SpanMaker, span_context

SPANS_AT_ONCE: Final = 512
"""Maximum number of spans in a message, because collectors limit messages to 4 MiB."""

_HTTP_PORT: Final = 4318
_UNKNOWN_SERVICE: Final = "unknown_service"


class OTLPExporter:
    """Sends traces to a collector from a thread, in batches.

    The variables `OTEL_*` of OpenTelemetry's SDK apply to the sampler, the resource, the batches and the connection.

    Raises:
        ConfigError: The environment names an unknown protocol.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        endpoint = config.frontend.otlp_traces_endpoint or ""
        resource = Resource.create({SERVICE_VERSION: __version__})
        instance = f"{socket.gethostname()}:{config.frontend.port}/{client_index}"
        for name, value in ((SERVICE_NAME, "engine"), (SERVICE_INSTANCE_ID, instance)):
            given = resource.attributes.get(name)
            if given is None or str(given).startswith(_UNKNOWN_SERVICE):
                resource = resource.merge(Resource({name: value}))
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        maker = SpanMaker(resource, config.model.served_names[0])
        self._processor = BatchSpanProcessor(_TraceExporter(_connect(endpoint), maker))

    def should_sample(self, context: TraceContext, parent: TraceContext | None) -> bool:
        """Return whether a trace is recorded. By default it is, unless the client has decided otherwise."""
        around = Context()
        if parent is not None:
            span = NonRecordingSpan(span_context(parent, parent.span_id, is_remote=True))
            around = set_span_in_context(span, around)
        result = self._sampler.should_sample(around, context.trace_id, "POST", SpanKind.SERVER)
        return bool(result.decision.is_sampled())

    def export(self, trace: RequestTrace) -> None:
        """Send a complete trace in the background."""
        self._processor.on_end(_PendingTrace(trace))

    def close(self) -> None:
        """Send all traces that are still queued."""
        self._processor.shutdown()


class _PendingTrace(ReadableSpan):
    """A trace that is put into the SDK's queue instead of a span."""

    def __init__(self, trace: RequestTrace) -> None:
        context: SpanContext = span_context(trace.context, trace.context.span_id)
        super().__init__("", context, resource=_NO_RESOURCE)
        self.trace = trace


_NO_RESOURCE: Final = Resource({})


class _TraceExporter(SpanExporter):
    """Creates the spans of traces, in the thread that sends them."""

    def __init__(self, exporter: SpanExporter, maker: SpanMaker) -> None:
        self._exporter = exporter
        self._maker = maker

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans of each trace."""
        traces = [pending.trace for pending in spans if isinstance(pending, _PendingTrace)]
        made = self._maker.make_spans(traces)
        results = [
            self._exporter.export(made[start : start + SPANS_AT_ONCE])
            for start in range(0, len(made), SPANS_AT_ONCE)
        ]
        is_sent = all(result is SpanExportResult.SUCCESS for result in results)
        return SpanExportResult.SUCCESS if is_sent else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True, because nothing is held back."""
        return self._exporter.force_flush(timeout_millis)


def _connect(endpoint: str) -> SpanExporter:
    # The base URL for all signals, to which the SDK adds the path of traces.
    is_base = endpoint == os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)
    url = None if is_base else endpoint
    if _find_protocol(endpoint) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGRPC

        return ByGRPC(endpoint=url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHTTP

    return ByHTTP(endpoint=url)


def _find_protocol(endpoint: str) -> str:
    """Return `grpc` or `http/protobuf`: the protocol in the environment, else the one that the port or path implies."""
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        protocol = os.environ.get(variable)
        if protocol in ("grpc", "http/protobuf"):
            return protocol
        if protocol:
            raise ConfigError(f"{variable} must be grpc or http/protobuf, got {protocol!r}")
    url = urlsplit(endpoint)
    is_http = url.port == _HTTP_PORT or url.path.strip("/")
    return "http/protobuf" if is_http else "grpc"
