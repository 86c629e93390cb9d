"""Read numbers in paths, queries and keys."""

from __future__ import annotations

MAX_DIGITS = 18
"""Maximum digits, so that a number fits into 64 bits. Reading many thousand digits would raise an error."""


def parse_number(text: str) -> int | None:
    """Return the number of at most `MAX_DIGITS` decimal digits; None for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None
