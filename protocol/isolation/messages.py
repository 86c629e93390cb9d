"""Messages between a process and its disposable processes."""

from __future__ import annotations

from typing import Final

import msgspec

LENGTH_BYTES: Final = 4
"""Size of the big-endian length before each message, in bytes."""


class Exited(msgspec.Struct, tag=0, array_like=True):
    """The process ended by this signal, or by none (0). Its fork server sends this message."""

    signal: int


_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length before it."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
