"""A caller's values as error messages show them: as JSON, and never long."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_SHOWN: Final = 100
"""Characters of a value that a message repeats."""

_encode = msgspec.json.Encoder().encode


def echo(value: object) -> str:
    """Return `value` as JSON, cut to `MAX_SHOWN` characters."""
    try:
        text = _encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = repr(value)
    return cut(text)


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the first `limit` characters of a text, and its length if that is not all of it."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
