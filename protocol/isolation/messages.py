"""Messages between a process and its disposable processes."""

from __future__ import annotations

import signal
from typing import Final

import msgspec

LENGTH_BYTES: Final = 4
"""Size in bytes of the big-endian length in front of each message."""


GREETING: Final = b"+"
"""The first byte that a process sends."""

_FOREIGN: Final = frozenset({0, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM})


class Exited(msgspec.Struct, tag=0, array_like=True):
    """The process exited because of this signal, or 0 if there was none. Sent by its fork server.

    The signal is SIGSTOP if the process was stopped, and then killed by the fork server.
    """

    signal: int


def may_be_innocent(exited: Exited | None) -> bool:
    """Return whether something other than its input may have ended a process; None if nothing was reported."""
    return exited is None or exited.signal in _FOREIGN


_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message and put its length in front."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
