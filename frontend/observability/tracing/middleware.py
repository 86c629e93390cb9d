"""ASGI middleware that traces every POST request."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...http.request_headers import read_trace_headers
from .request_trace import current_trace
from .tracer import Tracer


class Tracing:
    """Begins a trace with each POST request, and ends it with the response.

    The response has the header `traceresponse` of the W3C draft "Trace Context HTTP Response". So a client that sent no
    context can find the trace.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        trace = self._tracer.begin(scope["method"], read_trace_headers(scope))
        header = (b"traceresponse", trace.context.parent_header.encode())

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        state = scope.setdefault("state", {})
        state["trace_headers"] = trace.context.headers
        token = current_trace.set(trace)
        try:
            await self._app(scope, receive, send_traced)
        finally:
            current_trace.reset(token)
            trace.end_response(scope["path"], state.get("request_id", ""))
