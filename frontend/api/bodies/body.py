"""Read request bodies up to a size limit and decode them into a schema. Errors name the invalid field."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgspec
import msgspec.inspect
from starlette.types import Receive, Scope

from ...client.executor import request_digest
from ...http.errors import APIError, echo
from ...supervisor.parse_journal import DIGEST_BYTES
from ..schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from ..schema.refused import ignored_fields, refused_fields, verify_supported, with_all_fields
from .conversion import invalid_field, with_integers
from .request_memory import MemoryLease
from .structure import FREE_BYTES, BodyStructure

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAMED_FIELDS: Final = 100
"""Maximum number of unknown fields named in the log, because a client can invent any number."""


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


class Body(msgspec.Struct):
    """A request body, in the pieces in which it arrived.

    `structure` is None for a body of at most `FREE_BYTES` or a form, whose elements are not counted.
    """

    parts: list[bytes]
    size: int
    structure: BodyStructure | None = None

    def join(self) -> bytes:
        """Return the body in one piece."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


async def read_body(
    scope: Scope, receive: Receive, limit: int, lease: MemoryLease, *, is_json: bool = True
) -> Body:
    """Return the whole request body and record its digest for the current task. Elements are counted if it is JSON.

    Raises:
        APIError: The body exceeds `limit` bytes (413), is compressed (415), has too many elements (400), or does not
            fit into the memory for large bodies (503).
        ClientDisconnected: The client closed the connection first.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise _too_large(limit, int(value))
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            encoding = echo(value.decode("latin-1"))
            raise APIError(
                415,
                f"the request body must not be compressed, got Content-Encoding {encoding}",
                headers={"accept-encoding": "identity"},
            )
    message = await receive()
    part = message.get("body", b"")
    if len(part) <= min(FREE_BYTES, limit) and not message.get("more_body", True):
        request_digest.set(blake2b(part, digest_size=DIGEST_BYTES).digest())
        return Body([part], len(part))
    parts: list[bytes] = []
    size = 0
    digest = blake2b(digest_size=DIGEST_BYTES)
    structure: BodyStructure | None = None
    while True:
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit, size)
        parts.append(part)
        digest.update(part)
        lease.count_bytes(len(part))
        if is_json and size > FREE_BYTES:
            if structure is None:
                structure, part = BodyStructure(), b"".join(parts)
            structure.count_elements(part)
        if not message.get("more_body", False):
            lease.mark_complete()
            request_digest.set(digest.digest())
            return Body(parts, size, structure)
        message = await receive()


def _too_large(limit: int, size: int) -> APIError:
    return APIError(413, f"the request body must have at most {limit} bytes, got at least {size}")


class BodyDecoder(Generic[T]):
    """Decodes bodies into one schema.

    With `strict`, unknown fields are rejected; otherwise each is logged once.
    """

    def __init__(self, schema: type[T], strict: bool) -> None:
        self.schema = schema
        self._strict = strict
        self._refused = refused_fields(schema)
        self._names = {*schema.__struct_encode_fields__, *self._refused, *ignored_fields(schema)}
        self._unknown: set[str] = set()

    # The decoders of all schemas would take a tenth of the time in which a frontend starts. So each is made for the
    # first body of its schema, within a millisecond or two.

    @cached_property
    def _known(self) -> Any:
        return msgspec.defstruct(
            self.schema.__name__, [], bases=(self._any,), forbid_unknown_fields=True
        )

    @cached_property
    def _any(self) -> Any:
        return with_all_fields(self.schema)

    @cached_property
    def _schema(self) -> Any:
        return self._known if self._strict else self._any

    @cached_property
    def _decode(self) -> Callable[[bytes], T]:
        return msgspec.json.Decoder(self._schema).decode

    @cached_property
    def _decode_known(self) -> Callable[[bytes], T]:
        return msgspec.json.Decoder(self._known).decode

    @cached_property
    def _type(self) -> msgspec.inspect.Type:
        """The types of the schema. Few bodies need them, and a server with all of them would start slowly."""
        return msgspec.inspect.type_info(self._schema)

    def decode(self, body: bytes) -> T:
        """Return the decoded body.

        Raises:
            APIError: The body is invalid; the error names the field, its value and what was expected (400).
        """
        try:
            request = self._decode_fields(body)
        except RecursionError:
            raise APIError(400, "the request body is nested too deeply") from None
        except (msgspec.DecodeError, ValueError) as error:
            if not body.strip():
                raise APIError(400, "the request body is empty") from None
            raise APIError(400, f"the request body is not valid JSON: {error}") from None
        verify_supported(request, self._refused)
        return request

    def _decode_fields(self, body: bytes) -> T:
        try:
            return self._decode_known(body)
        except msgspec.ValidationError as error:
            if self._strict:
                return self._decode_doubles(body, error)
        if len(self._unknown) < MAX_NAMED_FIELDS:
            self._log_unknown(body)
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            return self._decode_doubles(body, error)

    def _log_unknown(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
            for name in sorted(names - self._names - self._unknown):
                if len(self._unknown) < MAX_NAMED_FIELDS:
                    self._unknown.add(name)
                    logger.info("ignoring the unknown field %s in requests", echo(name))

    def _decode_doubles(self, body: bytes, error: msgspec.ValidationError) -> T:
        """Decode a body that may have integers written as `100.0`. If that does not help, raise `error`."""
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # The body has numbers that no type can hold, or is not valid JSON after the invalid field.
            raise invalid_field(str(error), body, kind=self.schema) from None
        try:
            request: T = msgspec.convert(with_integers(decoded, self._type), self._schema)
        except msgspec.ValidationError as other:
            raise invalid_field(str(other), body, kind=self.schema) from None
        return request


def make_decoder(schema: type[T], strict: bool) -> BodyDecoder[T]:
    """Return the decoder for a schema."""
    if schema is GenerationRequest:
        return InvocationDecoder(strict)  # type: ignore[return-value]
    return BodyDecoder(schema, strict)


class _Kind(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


class InvocationDecoder(BodyDecoder[GenerationRequest]):
    """Decodes a body with `messages` as a chat request, and any other body as a completion request."""

    def __init__(self, strict: bool) -> None:
        super().__init__(GenerationRequest, strict)
        self._chat = BodyDecoder(ChatCompletionRequest, strict)
        self._completion = BodyDecoder(CompletionRequest, strict)
        self._find_kind = msgspec.json.Decoder(_Kind).decode

    def decode(self, body: bytes) -> GenerationRequest:
        """Return the decoded body. Raise APIError 400 if the body is invalid."""
        try:
            is_chat = bytes(self._find_kind(body).messages) not in (b"", b"null")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # The completion decoder reports the error.
            is_chat = False
        return self._chat.decode(body) if is_chat else self._completion.decode(body)
