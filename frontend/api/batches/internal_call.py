"""Call a route of this server from within the process, without a connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Scope

from ....protocol.errors import ParameterError, UnavailableError
from ....protocol.process import logged_request_id
from ...http.errors import APIError, bad_request, json_response, unavailable
from ...store.client import RETRY_S


@dataclass(slots=True)
class CallResult:
    """The answer to a call. `retry_after_s` is None unless the server may accept the request later."""

    status: int
    body: bytes
    request_id: str
    content_type: str = "application/json"
    retry_after_s: float | None = None


class _Caller:
    """An in-process client: it sends one request and reads the whole answer."""

    is_paused = False
    has_chunks = True

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.on_writable: Callable[[], None] | None = None
        self.status = 0
        self.content_type = ""
        self.pieces: list[bytes] = []

    def begin_stream(self) -> None:
        """Do nothing, because there is no connection to prepare."""

    def write_chunk(self, data: bytes) -> None:
        self.pieces.append(data)

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.content_type = dict(message["headers"]).get(b"content-type", b"").decode()
        else:
            self.pieces.append(message.get("body", b""))


async def call_route(
    router: ASGIApp, path: str, body: bytes, identity: Mapping[str, Any]
) -> CallResult:
    """Send a JSON body to a route and return the answer. Errors are returned as answers, not raised.

    Args:
        router: The routes.
        path: The path of the route.
        body: The body.
        identity: The fields of the request's state that identify the client.
    """
    request_id = uuid.uuid4().hex
    logged_request_id.set(request_id)
    caller = _Caller(body)
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "state": {**identity, "request_id": request_id, "connection": caller, "is_internal": True},
    }
    try:
        await router(scope, caller.receive, caller.send)
        content = b"".join(caller.pieces)
        return CallResult(caller.status, content, request_id, caller.content_type)
    except APIError as caught:
        error = caught
    except ParameterError as caught_parameter:
        error = bad_request(caught_parameter.param, caught_parameter.problem)
    except UnavailableError as lack:
        error = unavailable(str(lack), RETRY_S)
    except HTTPException as routing:
        error = APIError(routing.status_code, routing.detail)
    retry_after = error.headers.get("retry-after")
    return CallResult(
        error.status,
        bytes(json_response(error.body).body),
        request_id,
        retry_after_s=float(retry_after) if retry_after and error.status in (429, 503) else None,
    )
