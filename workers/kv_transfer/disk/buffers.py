"""Read and write several buffers of a file at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final


def read_into(fd: int, parts: Sequence[memoryview], offset: int) -> bool:
    """Fill buffers from a file. Return False if the file ends before."""
    left = sum(map(len, parts))
    for start in range(0, len(parts), _MAX_PARTS):
        some = parts[start : start + _MAX_PARTS]
        wanted = sum(map(len, some))
        if os.preadv(fd, some, offset) != wanted:
            return False
        offset += wanted
        left -= wanted
    return not left


_MAX_PARTS: Final = 1024
"""Maximum number of buffers in one call of preadv(2) or pwritev(2)."""


def write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all parts at `offset`, one after the other. Raise OSError if the disk is full or failing."""
    data = [memoryview(part).cast("B") for part in parts]
    while data:
        written = os.pwritev(fd, data, offset)
        offset += written
        while data and written >= len(data[0]):
            written -= len(data.pop(0))
        if data:
            data[0] = data[0][written:]
