"""Report the load in response headers, for load balancers with ORCA (Open Request Cost Aggregation).

Envoy and vLLM use the same headers; https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
defines the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORMAT_HEADER: Final = b"endpoint-load-metrics-format"
REPORT_HEADER: Final = b"endpoint-load-metrics"


def format_report(format_name: str, metrics: Mapping[str, float]) -> str:
    """Return the value of the header in the format TEXT or JSON (ignoring case); "" for any other format."""
    match format_name.upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{n}={v}" for n, v in metrics.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": dict(metrics)})
    return ""


class LoadReports:
    """ASGI middleware that adds the load to the responses of requests that ask for it.

    Args:
        app: The application.
        read_load: Returns metric name -> value.
    """

    def __init__(self, app: ASGIApp, read_load: Callable[[], Mapping[str, float]]) -> None:
        self._app = app
        self._read_load = read_load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        wanted = next((value for name, value in scope["headers"] if name == FORMAT_HEADER), b"")
        if not wanted:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                report = format_report(wanted.decode("latin-1").strip(), self._read_load())
                if report:
                    header = (REPORT_HEADER, report.encode())
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_load)
