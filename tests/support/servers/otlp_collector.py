"""An OTLP collector for tests: it receives spans by gRPC or by HTTP and protobuf."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.processes.program import wait_until

GRPC_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource; a list of texts is a list."""

    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {each.key: value_of(each.value) for each in holder.attributes}


class Collector:
    """Records the spans that it receives. `resources` are those of each message."""

    def __init__(self, *, by_grpc: bool = False) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http: ThreadingHTTPServer | None = None
        if not by_grpc:
            self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"
            threading.Thread(target=self._http.serve_forever, daemon=True).start()
            return

        def export(request: ExportTraceServiceRequest, _: Any) -> ExportTraceServiceResponse:
            collector.add(request)
            return ExportTraceServiceResponse()

        method = grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        handlers = grpc.method_handlers_generic_handler(GRPC_SERVICE, {"Export": method})
        self._grpc.add_generic_rpc_handlers((handlers,))
        self.endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()

    def add(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for message in request.resource_spans:
                self.resources.append(attributes_of(message.resource))
                for scope in message.scope_spans:
                    self.spans += scope.spans

    def find_trace(self, trace_id: str, num_spans: int) -> list[Span]:
        """Wait until there are so many spans of a trace, and return them, the server's first."""

        def find() -> list[Span]:
            with self._lock:
                return [span for span in self.spans if span.trace_id.hex() == trace_id]

        wait_until(lambda: len(find()) >= num_spans, what=f"{num_spans} spans of {trace_id}")
        return sorted(find(), key=lambda span: span.kind != Span.SPAN_KIND_SERVER)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        else:
            self._grpc.stop(0).wait()
