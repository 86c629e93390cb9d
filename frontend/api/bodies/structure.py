"""Limits on the structure of a large request body, checked while it arrives.

A decoded element takes many times the memory of its text, and a decoder blocks all other threads. So the elements of a
body are counted before it is decoded. Each piece costs a few scans in C, and no copy of the body is kept.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...http.errors import APIError

FREE_BYTES: Final = 64 * 1024
"""Bodies up to this many bytes are not counted, because they cannot have enough elements to matter."""

MAX_VALUES: Final = 1 << 21
"""Maximum values in all objects and lists of a body, including token ids."""

MAX_OTHER_VALUES: Final = 1 << 18
"""Maximum values that are not token ids of prompts."""

MAX_STRINGS: Final = 1 << 16
"""Maximum strings, including names of fields."""

MAX_CONTAINERS: Final = 1 << 16
"""Maximum objects and lists."""

MAX_NESTING: Final = 512
"""Maximum levels of objects and lists."""

_PIECE_BYTES: Final = 64 * 1024
_BRACKETS: Final = b"[]{}"
_STEPS: Final = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _BRACKETS)


class BodyStructure:
    """Counts the elements of one JSON text. Invalid JSON is counted as well; the decoder rejects it later.

    `num_values` is the number of values in objects and lists so far, and `num_containers` that of objects and lists.
    """

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self.num_values = 0
        self.num_containers = 0
        self._num_quotes = 0
        self._nesting = 0
        self._in_string = False
        self._escape = b""

    @property
    def num_strings(self) -> int:
        """The number of strings so far, including names of fields."""
        return self._num_quotes // 2

    def count_elements(self, data: bytes) -> None:
        """Count the elements of the next part of the text. Raise APIError 400 if a limit is exceeded."""
        for start in range(0, len(data), _PIECE_BYTES):
            self._count_piece(data[start : start + _PIECE_BYTES])

    def _count_piece(self, piece: bytes) -> None:
        piece = (self._escape + piece).replace(b"\\\\", b"")
        # The character after a final backslash is at the beginning of the next piece.
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"")
        parts = piece.split(b'"')
        num_quotes = len(parts) - 1
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= bool(num_quotes & 1)
        self._num_quotes += num_quotes
        self.num_values += outside.count(b",")
        self.num_containers += outside.count(b"[") + outside.count(b"{")
        verify_count("strings", self.num_strings, MAX_STRINGS)
        verify_count("lists and objects", self.num_containers, MAX_CONTAINERS)
        verify_count("values", self.num_values, self._max_values)
        self._verify_nesting(outside)

    def _verify_nesting(self, outside: bytes) -> None:
        steps = np.frombuffer(outside.translate(_STEPS, _NO_BRACKETS), np.int8)
        if steps.size:
            levels = self._nesting + np.cumsum(steps, dtype=np.int32)
            self._nesting = int(levels[-1])
            if levels.max() > MAX_NESTING:
                raise _too_much(f"be nested at most {MAX_NESTING} levels deep", "more")


def verify_count(kind: str, count: int, limit: int) -> None:
    """Raise APIError 400 if a body has more than `limit` elements of a kind."""
    if count > limit:
        raise _too_much(f"have at most {limit} {kind}", f"at least {count}")


def _too_much(limit: str, got: str) -> APIError:
    return APIError(
        400,
        f"the request body must {limit}, got {got}; send less in one request",
        code="body_too_complex",
    )
