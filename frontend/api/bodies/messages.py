"""Messages between a frontend and the processes that decode large bodies for it."""

from __future__ import annotations

import struct
from array import array
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ...http.errors import APIError
from ..schema import (
    WITHOUT_EFFECT,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)

HEAD: Final = struct.Struct("<BQQ")
"""Before each body: the position of its schema in `SCHEMAS`, the number of its values and of its bytes."""

LENGTH: Final = struct.Struct("<Q")
"""Before each reply: the number of its bytes."""

SCHEMAS: Final[tuple[type[msgspec.Struct], ...]] = (
    CompletionRequest,
    ChatCompletionRequest,
    BatchChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    # A completion or a chat completion.
    GenerationRequest,
)

MAX_CPU_S: Final = 5
"""Seconds of processor time that one body may take."""

MAX_MEMORY_BYTES: Final = 1 << 30
"""Memory that one body may take while it is decoded."""


class Decoded(msgspec.Struct, tag=0, array_like=True):
    """A request. `fields` has all of it but its token ids: `token_ids` are one list, `token_lists` several.

    Token ids are integers of 64 bits. `fields` is MessagePack, or JSON where numbers need more than 64 bits.
    """

    schema: int
    fields: bytes
    is_json: bool = False
    token_ids: bytes | None = None
    token_lists: list[bytes] | None = None


class Refused(msgspec.Struct, tag=1, array_like=True):
    """What is wrong with a body."""

    status: int
    message: str
    param: str | None
    code: str | None


Reply: TypeAlias = Decoded | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(Decoded | Refused).decode
_decoders: Final = tuple(msgspec.msgpack.Decoder(schema).decode for schema in SCHEMAS)


def encode_reply(reply: Reply) -> bytes:
    return _encode(reply)


def pack(request: Any) -> tuple[Decoded, int]:
    """Return the message with a request, and how many token ids it has. The request loses its token ids."""
    # A decoder's own type may be a subclass that refuses unknown fields.
    schema = next(base for base in type(request).__mro__ if base in SCHEMAS)
    for name in WITHOUT_EFFECT:
        if hasattr(request, name):
            setattr(request, name, None)
    decoded = Decoded(SCHEMAS.index(schema), b"")
    num_token_ids = 0
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        num_token_ids = _pack_token_ids(request.prompt, decoded)
        if num_token_ids:
            request.prompt = None
    try:
        decoded.fields = _encode(request)
    except OverflowError:
        decoded.fields, decoded.is_json = msgspec.json.encode(request), True
    return decoded, num_token_ids


def _pack_token_ids(values: list[Any], decoded: Decoded) -> int:
    """Move the token ids, if nothing else is among them, to the message. Returns their number."""
    try:
        if values and isinstance(values[0], list):
            lists = [array("q", each) for each in values]
            decoded.token_lists = [each.tobytes() for each in lists]
            return sum(map(len, lists))
        decoded.token_ids = array("q", values).tobytes()
    except (TypeError, OverflowError):
        # What is wrong with them is reported where other requests are checked.
        return 0
    return len(values)


def unpack(reply: bytes) -> Any:
    """Return the request of a reply. Its token ids are arrays of numpy. Raises APIError for a refusal."""
    decoded = _decode_reply(reply)
    if isinstance(decoded, Refused):
        raise APIError(decoded.status, decoded.message, param=decoded.param, code=decoded.code)
    schema = SCHEMAS[decoded.schema]
    request: Any
    if decoded.is_json:
        request = msgspec.json.decode(decoded.fields, type=schema)
    else:
        request = _decoders[decoded.schema](decoded.fields)
    if decoded.token_ids is not None:
        request.prompt = np.frombuffer(decoded.token_ids, np.int64)
    elif decoded.token_lists is not None:
        request.prompt = [np.frombuffer(each, np.int64) for each in decoded.token_lists]
    return request
