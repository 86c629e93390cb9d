"""The record of a request in the store, from which any frontend or the next server can continue it."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.types import Message, Receive, Scope

from ...http.errors import APIError, bad_request, echo

KEY_HEADER: Final = "Idempotency-Key"
_KEY_HEADER: Final = KEY_HEADER.lower().encode()
_KEY = re.compile(rb"[ -~]{1,255}")
CONVERSATION_HEADER: Final = "X-Conversation-Id"
_CONVERSATION_HEADER: Final = CONVERSATION_HEADER.lower().encode()


class RequestRecord(msgspec.Struct, array_like=True, frozen=True):
    """A request as it was received, with the values that its frontend chose.

    Attributes:
        path: The route.
        body: The body as received.
        answer_id: The ID in the answer.
        request_id: The ID of the HTTP request.
        created: The time of the answer, in seconds since 1970.
        tenant: The tenant whose limits apply.
        cache_owner: The identity within which cached prefixes are shared.
        deadline: The deadline in seconds since 1970; 0.0 for none.
        seeds: The seed of each sequence.
        fingerprint: `system_fingerprint` of the model and adapter that generated the tokens.
        trace_headers: The W3C trace context.
        is_run: True if the request runs without a client and stores its answer in another form, so that the recording
            is deleted after its end.
    """

    path: str
    body: bytes
    answer_id: str
    request_id: str
    created: int
    tenant: str
    cache_owner: bytes
    deadline: float
    seeds: list[int]
    fingerprint: str
    trace_headers: dict[str, str] | None = None
    is_run: bool = False


_decode: Final = msgspec.msgpack.Decoder(RequestRecord).decode


def decode_record(data: bytes) -> RequestRecord:
    """Return the record of a request. Raise APIError 410 if the record was written by an incompatible version."""
    try:
        return _decode(data)
    except msgspec.DecodeError:
        raise APIError(
            410, "This request was recorded by another version of the server; send it again"
        ) from None


def wall_deadline(deadline: float) -> float:
    """Convert a deadline from CLOCK_MONOTONIC to seconds since 1970; 0.0 stays 0.0."""
    return deadline and time.time() + deadline - time.monotonic()


def monotonic_deadline(deadline: float) -> float:
    """Convert a deadline from seconds since 1970 to CLOCK_MONOTONIC seconds; 0.0 stays 0.0."""
    return deadline and max(time.monotonic() + deadline - time.time(), 1e-9)


def read_idempotency_key(scope: Scope) -> str:
    """Return the key in the header of a request; "" without the header.

    Raises:
        APIError: The key is too long or has characters that are not printable ASCII (400).
    """
    for name, value in scope["headers"]:
        if name == _KEY_HEADER:
            if _KEY.fullmatch(value) is None:
                raise bad_request(
                    KEY_HEADER,
                    f"must have 1 to 255 printable ASCII characters, got {echo(value.decode('latin-1'))}",
                )
            return str(value, "ascii")
    return ""


def read_conversation_key(scope: Scope) -> str:
    """Return the key under which the request of a conversation is recorded; "" without the header.

    Raises:
        APIError: The conversation's ID is too long or has characters that are not printable ASCII (400).
    """
    for name, value in scope["headers"]:
        if name == _CONVERSATION_HEADER:
            return conversation_key(value.decode("latin-1"), CONVERSATION_HEADER)
    return ""


def conversation_key(conversation: str, param: str) -> str:
    """Return the key under which the request of a conversation is recorded.

    The ID may end with `::` and the name of a model, which does not count.

    Raises:
        APIError: The ID is empty, too long, or has characters that are not printable ASCII (400).
    """
    if _KEY.fullmatch(conversation.encode("utf-8", "replace")) is None:
        raise bad_request(
            param, f"must have 1 to 255 printable ASCII characters, got {echo(conversation)}"
        )
    # Idempotency keys have no line breaks, so no client can send this key as one.
    return f"\n{conversation.partition('::')[0]}"


class RecordedBody:
    """A `receive` function that keeps a copy of the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []

    async def __call__(self) -> Message:
        """Receive the next message."""
        message = await self._receive()
        if part := message.get("body"):
            self._parts.append(part)
        return message

    def take(self) -> bytes:
        """Return the copy of the body, and release it."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


def replay_body(body: bytes, then: Receive) -> Callable[[], Awaitable[Any]]:
    """Return a `receive` function that returns a recorded body, and then the results of `then`."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await then()

    return receive
