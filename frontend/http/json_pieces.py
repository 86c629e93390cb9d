"""Encode large JSON responses in pieces.

A JSON encoder, and joining large byte strings, block all threads until they return. Pieces limit both times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

ELEMENTS_AT_ONCE: Final = 4096
"""Number of list elements that one call encodes."""

PIECE_BYTES: Final = 1 << 18
"""Approximate bytes of one piece."""

_PLACEHOLDER: Final = b"\0"
"""Placeholder for a value that was encoded before. JSON text never contains this byte, because strings escape it."""


class EncodedJSON:
    """A list or an object as JSON text in pieces of about `PIECE_BYTES`, for use inside another value."""

    __slots__ = ("pieces",)

    def __init__(self, opening: bytes, members: Iterable[bytes], closing: bytes) -> None:
        self.pieces: list[bytes] = []
        parts, num_bytes, separator = [opening], 0, b""
        for member in members:
            parts += (separator, member)
            separator = b","
            num_bytes += len(member)
            if num_bytes >= PIECE_BYTES:
                self.pieces.append(b"".join(parts))
                parts, num_bytes = [], 0
        parts.append(closing)
        self.pieces.append(b"".join(parts))


def _join(value: object) -> msgspec.Raw:
    if not isinstance(value, EncodedJSON):
        raise NotImplementedError(f"{type(value).__name__} cannot be converted to JSON")
    return msgspec.Raw(b"".join(value.pieces))


encode_whole: Final = msgspec.json.Encoder(enc_hook=_join).encode
"""Encode a value that may contain `EncodedJSON` as one byte string."""


def encode_list(elements: Iterable[object], at_once: int = ELEMENTS_AT_ONCE) -> EncodedJSON:
    """Encode a list, `at_once` elements per call."""
    iterator = iter(elements)
    batches = iter(lambda: list(islice(iterator, at_once)), [])
    return EncodedJSON(b"[", (encode_whole(batch)[1:-1] for batch in batches), b"]")


def join_lists(lists: Iterable[EncodedJSON]) -> EncodedJSON:
    """Return one list with the elements of several encoded lists."""
    members = (b"".join(each.pieces)[1:-1] for each in lists)
    return EncodedJSON(b"[", (each for each in members if each), b"]")


def encode_object(members: Iterable[tuple[str, object]]) -> EncodedJSON:
    """Encode an object. The names must differ."""
    iterator = iter(members)
    batches = iter(lambda: dict(islice(iterator, ELEMENTS_AT_ONCE)), {})
    return EncodedJSON(b"{", (encode_whole(batch)[1:-1] for batch in batches), b"}")


def encode_pieces(value: object) -> list[bytes]:
    """Encode a value that may contain `EncodedJSON`, without joining the pieces."""
    encoded: list[EncodedJSON] = []

    def hold(value: object) -> msgspec.Raw:
        if not isinstance(value, EncodedJSON):
            raise NotImplementedError(f"{type(value).__name__} cannot be converted to JSON")
        encoded.append(value)
        return msgspec.Raw(_PLACEHOLDER)

    text = msgspec.json.Encoder(enc_hook=hold).encode(value)
    return list(_fill(text, encoded)) if encoded else [text]


def _fill(text: bytes, encoded: list[EncodedJSON]) -> Iterator[bytes]:
    first, *others = text.split(_PLACEHOLDER)
    yield first
    for value, other in zip(encoded, others, strict=True):
        yield from value.pieces
        yield other
