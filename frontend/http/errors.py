"""Errors in the format of OpenAI's API: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol.errors import ParameterError
from .json_pieces import PIECE_BYTES, encode_pieces
from .shown_values import cut
from .shown_values import echo as echo

MAX_MESSAGE: Final = 600
"""Maximum characters of a message. Messages may repeat a client's text: a chat template can raise any message."""

_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.@+-]+){2,}/?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b|\b(?:ipc|tcp|file)://\S+")


class APIError(Exception):
    """An error that ends a request with an HTTP status and an error body, to which `details` adds fields."""

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
        self.details: Mapping[str, Any] = {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.details}}

    def rename(self, param: str) -> None:
        """Give the field another name, in the message too."""
        if self.param is not None:
            field = rf"(?<![\w.]){re.escape(self.param)}(?!\w)"
            self.message = cut(re.sub(field, lambda _: param, self.message), MAX_MESSAGE)
            self.args = (self.message,)
        self.param = cut(param)

    def response(self) -> Response:
        """Return the HTTP response."""
        return json_response(self.body, self.status, self.headers)


def bad_request(param: str, problem: str, code: str | None = None) -> APIError:
    """Return a 400 for an invalid field. Like that of a `ParameterError`, the message is its name and the problem."""
    return APIError(400, f"{param} {problem}", param=param, code=code)


def wrong(param: str, expected: str, value: object) -> APIError:
    """Return a 400 that says what a field must be, and what it is."""
    return bad_request(param, f"must be {expected}, got {echo(value)}")


@contextmanager
def reject_deep_nesting(param: str) -> Iterator[None]:
    """Turn a RecursionError in this context into APIError 400, because `param` is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise bad_request(param, "is nested too deeply") from None


@contextmanager
def renaming(rename: Callable[[str], str]) -> Iterator[None]:
    """Give the fields in the errors of this context the names that the client used.

    Args:
        rename: Function from the name of a field in an error to its name in the body.
    """
    try:
        yield
    except ParameterError as error:
        raise bad_request(rename(error.param), error.problem) from None
    except APIError as error:
        if error.param is not None and (param := rename(error.param)) != error.param:
            error.rename(param)
        raise


def renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function that renames fields and the places within them, such as `tools[0].name`."""

    def rename(place: str) -> str:
        for name, sent in names.items():
            if place == name or place.startswith((f"{name}.", f"{name}[")):
                return sent + place.removeprefix(name)
        return place

    return rename


def expect_text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field of an object at `where`. Raise APIError 400 if it is not a string."""
    text: str = expect(fields.get(name), str, f"{where}.{name}", "a string")
    return text


def expect(value: Any, kind: type, param: str, expected: str) -> Any:
    """Return `value` if it is an instance of `kind`.

    Raises:
        APIError: It is not (400); the message names the field and what it must be.
    """
    if not isinstance(value, kind):
        raise wrong(param, expected, value)
    return value


def verify_choice(name: str, value: str | None, allowed: Collection[str]) -> None:
    """Raise APIError 400 unless a value is None or one of `allowed`."""
    if value is not None and value not in allowed:
        one_of = " or ".join(f'"{choice}"' for choice in allowed)
        raise wrong(name, one_of, value)


def unavailable(message: str, retry_after_s: float) -> APIError:
    """Return a 503: the server may be able to accept the request after `retry_after_s` seconds."""
    headers = retry_after(retry_after_s)
    return APIError(503, message, type="service_unavailable_error", headers=headers)


def too_many_requests(message: str, retry_after_s: float) -> APIError:
    """Return a 429: this client has reached its own limit, while other clients are served."""
    headers = retry_after(retry_after_s)
    return APIError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers
    )


def deadline_exceeded(message: str, retry_after_s: float) -> APIError:
    """Return a 504: the request's deadline passed before there was any output."""
    headers = retry_after(retry_after_s)
    return APIError(504, message, type="timeout_error", code="deadline_exceeded", headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    """Return the `Retry-After` header for a number of seconds, rounded up to an integer of at least 1."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def internal_error(message: str, *, may_retry: bool = True) -> APIError:
    """Return a 500. OpenAI's clients retry it automatically unless `may_retry` is false."""
    headers = None if may_retry else {"x-should-retry": "false"}
    return APIError(500, message, type="internal_server_error", headers=headers)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with `content` as JSON. Large parts (`EncodedJSON`) are sent piece by piece."""
    pieces = encode_pieces(content)
    size = sum(map(len, pieces))
    if len(pieces) == 1 or size <= PIECE_BYTES:
        return Response(b"".join(pieces), status, headers, "application/json")
    return _LongResponse(pieces, status, (headers or {}) | {"content-length": str(size)})


def bytes_response(pieces: list[bytes], headers: dict[str, str]) -> Response:
    """Return a response with bytes that are not text. They are sent piece by piece."""
    size = {"content-length": str(sum(map(len, pieces)))}
    return _LongResponse(pieces, 200, headers | size, "application/octet-stream")


class _LongResponse(Response):
    """A response that is sent in pieces. Between pieces it waits for a slow client and lets other tasks run."""

    def __init__(
        self,
        pieces: list[bytes],
        status: int,
        headers: dict[str, str],
        media_type: str = "application/json",
    ) -> None:
        super().__init__(None, status, headers, media_type)
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
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def redact(message: str) -> str:
    """Return an internal error message with file paths and network addresses of this machine removed."""
    return _ADDRESS.sub("[address]", _PATH.sub("[path]", message))
