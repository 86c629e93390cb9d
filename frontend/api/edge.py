"""Middleware around every endpoint: request IDs, access control and error responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...protocol.errors import ParameterError, UnavailableError
from ...protocol.process import logged_request_id
from ..client.sequence_io import is_accepted
from ..http.access import Access, normalize_path
from ..http.errors import (
    APIError,
    bad_request,
    echo,
    internal_error,
    json_response,
    redact,
    unavailable,
)
from ..store.client import RETRY_S, StoreError, UnknownObject
from .bodies.body import ClientDisconnected

logger = logging.getLogger(__name__)

ErrorBody = Callable[[APIError, str], dict[str, Any]]
"""Function from an error and the request ID to the body of an error response."""

MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of a rejected request's body that are received before the error is sent."""
MAX_DISCARD_S: Final = 5.0
"""Maximum seconds to receive the rest of a rejected request's body."""

_ACCEPTABLE_ID = re.compile(rb"[!-~]{1,128}")


class Edge:
    """ASGI middleware around the router.

    Every response carries `x-request-id`, and every failure becomes an error body. An unexpected exception is logged
    with the request ID, and only that ID is sent to the client. `error_bodies` maps path prefixes of dialects to the
    functions that write their errors; all other errors have OpenAI's format. Requests that begin while the server
    `is_open` are accepted: a shutdown that begins later does not reject their work. A path for which `has_route` is
    false is answered with 404, even if the body has the wrong content type.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        root_path: str,
        error_bodies: Mapping[str, ErrorBody] | None = None,
        is_open: Callable[[], bool] = lambda: True,
        has_route: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self._app = app
        self._error_bodies = {} if error_bodies is None else error_bodies
        self._access = access
        self._root_path = root_path.rstrip("/")
        self._is_open = is_open
        self._has_route = has_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. If the server stops before that, close the connection."""
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            # The server is stopping, and this client did not send its request or read its response in time.
            scope["state"]["connection"].close_now()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given_id = _given_id(scope)
        request_id = given_id or uuid.uuid4().hex
        logged_request_id.set(request_id)
        normalize_path(scope, self._root_path)
        scope["app"] = self
        scope.setdefault("state", {}).update(
            request_id=request_id,
            has_given_id=bool(given_id),
            is_accepted=self._is_open(),
            tenant="",
            owner="",
            cache_owner=b"",
        )
        is_accepted.set(scope["state"]["is_accepted"])
        started = False
        has_body_left = not _expects_permission(scope)

        async def receive_body() -> Message:
            nonlocal has_body_left
            message = await receive()
            has_body_left = has_body_left and message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                sent_id: str = scope["state"]["request_id"]
                headers = [*message.get("headers", ()), (b"x-request-id", sent_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._access.check(scope)
            await self._app(scope, receive_body, send_with_id)
            return
        except ClientDisconnected:
            return
        except APIError as error:
            answer = error
            if error.status == 415 and not self._has_route(get_route_path(scope)):
                answer = _routing_error(HTTPException(404), scope)
        except ParameterError as error:
            answer = bad_request(error.param, error.problem)
        except (StoreError, UnavailableError) as error:
            answer = unavailable(redact(str(error)), RETRY_S)
        except UnknownObject as error:
            answer = APIError(400, str(error), param="after")
        except HTTPException as error:
            answer = _routing_error(error, scope)
        except Exception:
            failed_id = scope["state"]["request_id"]
            logger.exception("request %s failed", failed_id)
            answer = internal_error(f"Internal server error (request {failed_id})")
        if not started:
            if has_body_left:
                await _discard_body(receive)
            await self._error_response(answer, scope)(scope, receive, send_with_id)

    def _error_response(self, error: APIError, scope: Scope) -> Response:
        path = get_route_path(scope)
        for prefix, error_body in self._error_bodies.items():
            is_start = prefix.endswith("/") and path.startswith(prefix)
            is_end = prefix.startswith(":") and path.endswith(prefix)
            if path == prefix or is_start or is_end:
                body = error_body(error, scope["state"]["request_id"])
                return json_response(body, error.status, error.headers)
        return error.response()


def _given_id(scope: Scope) -> str:
    """Return the request ID that the client sent; "" if it sent none or an invalid one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTABLE_ID.fullmatch(value):
            return str(value, "ascii")
    return ""


def _expects_permission(scope: Scope) -> bool:
    """Return whether the client waits for `100 Continue` before it sends its body."""
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


async def _discard_body(receive: Receive) -> None:
    """Receive the rest of the body, within limits: most clients read no response before all of it is sent."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_DISCARD_S):
            while size < MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _routing_error(error: HTTPException, scope: Scope) -> APIError:
    where = f"{scope['method']} {echo(get_route_path(scope))[1:-1]}"
    problems = {404: "There is no such route", 405: "The method is not allowed for this route"}
    message = f"{problems.get(error.status_code, error.detail)}: {where}"
    return APIError(error.status_code, message, headers=dict(error.headers or {}))
