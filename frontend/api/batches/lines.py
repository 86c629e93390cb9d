"""Parse and write the lines of a batch's files, in OpenAI's format."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from ...http.errors import echo
from ..logprobs import Json

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Routes that a batch of OpenAI's API may call. The prefix `/v1` may be left out."""

MESSAGES: Final = "/v1/messages"
"""The route that a batch of Anthropic's API calls."""

MAX_REQUESTS: Final = 50_000
MAX_ERRORS: Final = 20
"""Maximum number of invalid lines that are reported."""

MAX_ID: Final = 512
"""Maximum characters of a `custom_id`."""


class BatchLine(msgspec.Struct, kw_only=True):
    """A request in a batch's input file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BadLine(Exception):
    """Raised for a line that is not a valid request; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_decode_line: Final = msgspec.json.Decoder(BatchLine).decode


def parse_line(line: bytes, endpoint: str | None) -> BatchLine:
    """Return the request of a line; `endpoint` is the route that all lines must have, None for any.

    Raises:
        BadLine: The line is not a valid request.
    """
    try:
        request = _decode_line(line)
    except msgspec.ValidationError as error:
        raise BadLine(str(error)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadLine(f"the line is not valid JSON: {error}") from None
    if not 0 < len(request.custom_id) <= MAX_ID:
        raise BadLine(
            f"custom_id must have between 1 and {MAX_ID} characters, got {len(request.custom_id)}",
            "custom_id",
        )
    if request.method != "POST":
        raise BadLine(f"method must be POST, got {echo(request.method)}", "method")
    wanted = (*ENDPOINTS, MESSAGES) if endpoint is None else (endpoint,)
    url = with_version(request.url)
    if url not in wanted:
        raise BadLine(f"url must be {' or '.join(wanted)}, got {echo(request.url)}", "url")
    request.url = url
    for name in ("stream", "background"):
        if request.body.get(name):
            raise BadLine(f"{name} is not supported in batches; leave it out", f"body.{name}")
    return request


def with_version(url: str) -> str:
    """Return the path of a route with the prefix that clients of Azure and vLLM leave out."""
    return url if url.startswith(("/v1/", "/v2/")) else f"/v1{url}"


def find_errors(lines: Iterable[bytes], endpoint: str | None) -> tuple[int, list[Json]]:
    """Return the number of requests, and the errors of the first invalid lines."""
    errors: list[Json] = []
    identifiers: set[str] = set()
    num_lines = 0

    def report(code: str, message: str, param: str | None) -> None:
        if len(errors) < MAX_ERRORS:
            errors.append({"code": code, "line": num_lines, "message": message, "param": param})

    for line in lines:
        num_lines += 1
        try:
            request = parse_line(line, endpoint)
        except BadLine as error:
            report("invalid_request", str(error), error.param)
            continue
        if request.custom_id in identifiers:
            report(
                "duplicate_custom_id",
                f"custom_id {echo(request.custom_id)} is already used by an earlier line",
                "custom_id",
            )
        identifiers.add(request.custom_id)
    if not num_lines:
        report("empty_file", "the input file has no requests", None)
    if num_lines > MAX_REQUESTS:
        report(
            "too_many_requests",
            f"the input file has {num_lines} requests, at most {MAX_REQUESTS} are allowed",
            None,
        )
    return num_lines, errors


def split_lines(content: bytes) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if line := content[start:end].strip():
            yield line
        start = end + 1


def result_line(
    custom_id: str, status: int, request_id: str, content: bytes, content_type: str
) -> Json:
    """Return the output line for an answered request. A body that is not JSON becomes a string."""
    body = msgspec.Raw(content) if content_type.startswith("application/json") else content.decode()
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id) | {"response": response, "error": None}


def error_line(custom_id: str, code: str, message: str) -> Json:
    """Return the error line for a request that was not answered."""
    return _line(custom_id) | {"response": None, "error": {"code": code, "message": message}}


def _line(custom_id: str) -> Json:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
