"""Large JSON written piece by piece: an encoder holds all threads up until it returns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

ELEMENTS_AT_ONCE: Final = 4096

_encode = msgspec.json.Encoder().encode


def encode_list(elements: Iterable[object]) -> msgspec.Raw:
    """Return a list as JSON, for use inside another value."""
    iterator = iter(elements)
    pieces = []
    while piece := list(islice(iterator, ELEMENTS_AT_ONCE)):
        pieces.append(_encode(piece)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


def encode_object(fields: Iterable[tuple[str, object]]) -> msgspec.Raw:
    """Return an object as JSON, for use inside another value. The names must differ."""
    iterator = iter(fields)
    pieces = []
    while piece := dict(islice(iterator, ELEMENTS_AT_ONCE)):
        pieces.append(_encode(piece)[1:-1])
    return msgspec.Raw(b"{%b}" % b",".join(pieces))
