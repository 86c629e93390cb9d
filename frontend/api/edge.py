"""What happens to every request before and after its endpoint: identity, authorisation, errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from typing import Final

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...protocol.errors import ParameterError
from .body import ClientDisconnected
from .errors import APIError, bad_request, echo, internal_error

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/metrics", "/version"})

MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
MAX_DISCARD_S: Final = 5.0

_ACCEPTABLE_ID = re.compile(rb"[!-~]{1,128}")


class Edge:
    """ASGI middleware around the router.

    Where there are several API keys, each is a tenant: `tenant` of the request's state is "key 1" for the first.
    Every answer carries `x-request-id`; every failure becomes an error body. An unexpected exception is logged with the
    request's id, and the client gets that id only.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], root_path: str) -> None:
        self._app = app
        self._key_digests = [_digest(key.encode()) for key in api_keys]
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope["root_path"] = self._root_path
        scope["app"] = self
        # Clients join paths carelessly.
        scope["path"] = scope["path"].removesuffix("/") or "/"
        scope.setdefault("state", {}).update(request_id=request_id, tenant="")
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
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._authorize(scope)
            await self._app(scope, receive_body, send_with_id)
            return
        except ClientDisconnected:
            return
        except APIError as error:
            answer = error
        except ParameterError as error:
            answer = bad_request(error.param, str(error))
        except HTTPException as error:
            answer = _of_router(error, scope)
        except Exception:
            logger.exception("request %s failed", request_id)
            answer = internal_error(f"Internal server error (request {request_id})")
        if not started:
            if has_body_left:
                await _discard_body(receive)
            await answer.response()(scope, receive, send_with_id)

    def _authorize(self, scope: Scope) -> None:
        if not self._key_digests or get_route_path(scope) in OPEN_PATHS:
            return
        digest = _digest(_bearer(scope))
        # Every key is compared in full, so that the time taken says nothing about any of them.
        matches = [hmac.compare_digest(digest, key) for key in self._key_digests]
        if len(matches) > 1 and any(matches):
            scope["state"]["tenant"] = f"key {matches.index(True) + 1}"
        if not any(matches):
            raise APIError(
                401,
                "Incorrect or missing API key: send it as `Authorization: Bearer KEY`",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
    return b""


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTABLE_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def _expects_permission(scope: Scope) -> bool:
    """Whether the client sent `Expect: 100-continue` and has not sent its body: an answer now spares it that."""
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


async def _discard_body(receive: Receive) -> None:
    """Read on, within bounds, since most clients look for an answer only when all is sent."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_DISCARD_S):
            while size < MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _of_router(error: HTTPException, scope: Scope) -> APIError:
    where = f"{scope['method']} {echo(get_route_path(scope))[1:-1]}"
    what = {404: "There is no such route", 405: "The method is not allowed for this route"}
    message = f"{what.get(error.status_code, error.detail)}: {where}"
    return APIError(error.status_code, message, headers=dict(error.headers or {}))
