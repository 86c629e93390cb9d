"""Format a client's values for error messages: as JSON, cut to a maximum length."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_SHOWN: Final = 100
"""Maximum characters of a value in a message."""

_encode = msgspec.json.Encoder().encode


def echo(value: object) -> str:
    """Return `value` as JSON, cut to `MAX_SHOWN` characters."""
    try:
        text = _encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = repr(value)
    return cut(text)


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the first `limit` characters of a text. If the text is longer, its length follows."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
