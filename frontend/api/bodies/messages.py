"""Messages between a frontend and the processes that decode large bodies for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ....protocol.isolation.messages import Exited
from ...http.errors import APIError
from .. import schema
from ..schema import CompletionRequest, GenerationRequest
from ..schema.refused import ignored_fields
from ..schema.responses import ResponseFields


class Decode(msgspec.Struct, tag=1, array_like=True):
    """A request to decode the content, JSON with `num_values` values and `size` bytes, into `SCHEMAS[schema]`."""

    schema: int
    num_values: int
    size: int


class Answer(msgspec.Struct, tag=2, array_like=True):
    """The answer, whose content is a `Reply` of this size in bytes."""

    size: int


def _find_schemas() -> Iterator[type[msgspec.Struct]]:
    names = (module.name for module in walk_packages(schema.__path__, f"{schema.__name__}."))
    for module in (schema, *map(import_module, names)):
        for name, value in vars(module).items():
            if name.endswith("Request") and issubclass(value, msgspec.Struct):
                yield value


SCHEMAS: Final = tuple(dict.fromkeys(_find_schemas()))
"""The schemas of all request bodies: the structs below `schema` whose names end with `Request`."""

MAX_CPU_S: Final = 5
"""Maximum seconds of processor time for one body."""

MAX_MEMORY_BYTES: Final = 1 << 30
"""Maximum memory for decoding one body, in bytes."""


LONG_TEXT: Final = 1 << 20
"""Maximum characters of a text that is decoded in one call, which blocks all other threads."""

PIECE: Final = 1 << 16
"""Number of characters in each piece of a longer text."""

_TEXT: Final = 1
"""The MessagePack extension type that stands for a long text: its position in `Decoded.texts`."""


class Decoded(msgspec.Struct, tag=0, array_like=True):
    """A decoded request without its token ids and long texts, which are sent separately.

    `token_ids` is the prompt if it is one list of 64-bit integers, `token_lists` if it is several lists. `texts` has
    the pieces of long texts; if `is_prompt`, the only text is the prompt. `fields` is MessagePack, or JSON if a number
    does not fit in 64 bits.
    """

    schema: int
    fields: bytes
    is_json: bool = False
    token_ids: bytes | None = None
    token_lists: list[bytes] | None = None
    texts: list[list[memoryview]] | None = None
    is_prompt: bool = False


class Refused(msgspec.Struct, tag=1, array_like=True):
    """The error response for an invalid body."""

    status: int
    message: str
    param: str | None
    code: str | None


Reply: TypeAlias = Decoded | Refused

decode_request: Final = msgspec.msgpack.Decoder(Decode).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer | Exited).decode

_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(Decoded | Refused).decode


@cache
def _decoder(schema: int) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(SCHEMAS[schema])


def too_complex(reason: str) -> APIError:
    """Return the error for a body that exceeds a limit."""
    problem = f"the request body {reason}; send less in one request"
    return APIError(400, problem, code="body_too_complex")


def too_large() -> APIError:
    """Return the error for a body that needs too much memory."""
    return too_complex(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to decode")


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as MessagePack."""
    return _encode(reply)


def pack(request: Any) -> tuple[Decoded, int]:
    """Remove the token ids from a request. Return the message for the rest, and the number of token ids."""
    # The decoder's type may be a subclass that rejects unknown fields.
    schema = next(base for base in type(request).__mro__ if base in SCHEMAS)
    for name in ignored_fields(schema):
        setattr(request, name, None)
    if isinstance(request, GenerationRequest) and not request.store:
        request.metadata = None
    decoded = Decoded(SCHEMAS.index(schema), b"")
    num_token_ids = 0
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        num_token_ids = _pack_token_ids(request.prompt, decoded)
        if num_token_ids:
            request.prompt = None
    _pack_texts(request, decoded)
    try:
        decoded.fields = _encode(request)
    except OverflowError:
        if decoded.texts:
            raise APIError(
                400, "the request body has a number that does not fit in 64 bits"
            ) from None
        decoded.fields, decoded.is_json = msgspec.json.encode(request), True
    return decoded, num_token_ids


def _pack_token_ids(values: list[Any], decoded: Decoded) -> int:
    """Move the token ids of the prompt to the message, and return their number.

    Do nothing if they are not all integers.
    """
    try:
        if values and isinstance(values[0], list):
            lists = [array("q", each) for each in values]
            decoded.token_lists = [each.tobytes() for each in lists]
            return sum(map(len, lists))
        decoded.token_ids = array("q", values).tobytes()
    except (TypeError, OverflowError):
        # The list stays in the request, so that later checks report the invalid entry.
        return 0
    return len(values)


_OBJECTS: Final = ("prompt", "input", "content")
"""Fields that may have objects with a text and its media."""

_MEDIA: Final = ("image_data", "video_data", "audio_data")


def _pack_texts(request: Any, decoded: Decoded) -> None:
    """Move long texts of the prompt, its media or the messages from the request to the message."""
    texts: list[list[memoryview]] = []

    def move(value: Any) -> Any:
        if isinstance(value, str) and len(value) > LONG_TEXT:
            starts = range(0, len(value), PIECE)
            texts.append([memoryview(value[at : at + PIECE].encode()) for at in starts])
            return msgspec.msgpack.Ext(_TEXT, (len(texts) - 1).to_bytes(8, "little"))
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        return [move(item) for item in value] if isinstance(value, list) else value

    if isinstance(prompt := getattr(request, "prompt", None), str):
        if len(prompt) > LONG_TEXT:
            move(prompt)
            request.prompt, decoded.is_prompt = None, True
    elif isinstance(request, ResponseFields) and isinstance(request.input, list):
        request.input = move(request.input)
    elif (messages := getattr(request, "messages", None)) is not None:
        request.messages = move(messages)
    else:
        # Only values of objects, and of fields that may have any type, are decoded from an extension type.
        for name in _OBJECTS:
            value = getattr(request, name, None)
            if isinstance(value, dict):
                setattr(request, name, move(value))
            elif isinstance(value, list):
                moved = [move(each) if isinstance(each, dict) else each for each in value]
                setattr(request, name, moved)
        for name in _MEDIA:
            if (value := getattr(request, name, None)) is not None:
                setattr(request, name, move(value))
    decoded.texts = texts or None


def unpack(reply: bytes | bytearray) -> Any:
    """Return the request of a reply, with its token ids as numpy arrays. Raise APIError if the body was rejected."""
    decoded = _decode_reply(reply)
    if isinstance(decoded, Refused):
        raise APIError(decoded.status, decoded.message, param=decoded.param, code=decoded.code)
    schema = SCHEMAS[decoded.schema]
    request: Any
    texts = [
        # Other threads can run between two pieces.
        "".join([str(piece, "utf-8") for piece in pieces])
        for pieces in decoded.texts or ()
    ]
    if decoded.is_json:
        request = msgspec.json.decode(decoded.fields, type=schema)
    elif texts:

        def find_text(_: int, index: memoryview) -> str:
            return texts[int.from_bytes(index, "little")]

        request = msgspec.msgpack.decode(decoded.fields, type=schema, ext_hook=find_text)
        if decoded.is_prompt:
            [request.prompt] = texts
    else:
        request = _decoder(decoded.schema).decode(decoded.fields)
    if decoded.token_ids is not None:
        request.prompt = np.frombuffer(decoded.token_ids, np.int64)
    elif decoded.token_lists is not None:
        request.prompt = [np.frombuffer(each, np.int64) for each in decoded.token_lists]
    return request
