"""Messages between a process and its disposable processes."""

from __future__ import annotations

from typing import Final

import msgspec

LENGTH_BYTES: Final = 4
"""Size in bytes of the big-endian length in front of each message."""


class Exited(msgspec.Struct, tag=0, array_like=True):
    """The process exited because of this signal, or 0 if there was none. Sent by its fork server."""

    signal: int


_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message and put its length in front."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
