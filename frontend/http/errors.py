"""Errors in the shape that OpenAI clients parse: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol.errors import ParameterError
from .json_pieces import encode_pieces
from .shown_values import cut
from .shown_values import echo as echo

MAX_MESSAGE: Final = 600
"""Characters of a whole message, of which the caller's own words may be any part: a template writes some itself."""

_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.@+-]+){2,}/?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b|\b(?:ipc|tcp|file)://\S+")


class APIError(Exception):
    """Ends a request with an HTTP status and an error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = cut(message, MAX_MESSAGE)
        self.type = type
        self.param = None if param is None else cut(param)
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def bad_request(param: str | None, message: str, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


@contextmanager
def nesting_refused(param: str) -> Iterator[None]:
    """Raises APIError 400 for what is nested too deeply to be read or written."""
    try:
        yield
    except RecursionError:
        raise bad_request(param, f"{param} is nested too deeply") from None


def renamed(error: ParameterError, param: str) -> APIError:
    """`error` in the name that the request used for its parameter."""
    return bad_request(param, str(error).replace(error.param, param, 1))


def unavailable(message: str, retry_after_s: float) -> APIError:
    """503 for a server that cannot take this request now but may in `retry_after_s` seconds."""
    headers = retry_after(retry_after_s)
    return APIError(503, message, type="service_unavailable_error", headers=headers)


def too_many_requests(message: str, retry_after_s: float) -> APIError:
    """429 for a client that has reached its own limit, while others are served."""
    headers = retry_after(retry_after_s)
    return APIError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers
    )


def deadline_exceeded(message: str, retry_after_s: float) -> APIError:
    """504 for a request whose deadline passed before there was anything to answer."""
    headers = retry_after(retry_after_s)
    return APIError(504, message, type="timeout_error", code="deadline_exceeded", headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds, at least 1."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def internal_error(message: str, *, may_retry: bool = True) -> APIError:
    """500, after which the clients of OpenAI try again by themselves unless they are told not to."""
    headers = None if may_retry else {"x-should-retry": "false"}
    return APIError(500, message, type="internal_server_error", headers=headers)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with `content` as JSON. Large parts of it (`EncodedJSON`) are sent piece by piece."""
    pieces = encode_pieces(content)
    if len(pieces) == 1:
        return Response(pieces[0], status, headers, "application/json")
    length = {"content-length": str(sum(map(len, pieces)))}
    return _LongResponse(pieces, status, (headers or {}) | length)


class _LongResponse(Response):
    """A JSON response that waits for a slow client between its pieces."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], status: int, headers: dict[str, str]) -> None:
        super().__init__(None, status, headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def public(message: str) -> str:
    """An internal error message without the paths and addresses of this machine."""
    return _ADDRESS.sub("[address]", _PATH.sub("[path]", message))
