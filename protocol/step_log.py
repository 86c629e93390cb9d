"""The last steps that a core has sent, in a file where its workers find them when it has died.

A step is sent to one worker after the other, and a core may die in between. It is written down before it is sent to the
first, so that workers that did not get it can catch up with the others, which wait for them in that step.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from struct import Struct
from typing import Final

import msgspec

from .errors import RunDirectoryError
from .messages import SchedulerOutput
from .transport import MAX_FRAME_BYTES

_NUM_PLACES: Final = 16
"""More than steps are ever in flight."""

_HEADER: Final = Struct("<QQQ")
"""Epoch, step, length of the frame. It fits into a page, so that it is there as a whole or not at all."""

_PLACE_BYTES: Final = _HEADER.size + MAX_FRAME_BYTES
"""What is not written of it takes no room on disk."""

_decode = msgspec.msgpack.Decoder(SchedulerOutput).decode


class StepLog:
    """Written by the core of one epoch."""

    def __init__(self, path: str, epoch: int) -> None:
        """Raises RunDirectoryError if there is no room for the file."""
        self._epoch = epoch
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise RunDirectoryError(path, error.strerror) from error

    def append(self, step: int, frame: bytes) -> None:
        """Raises OSError if the disk is full; then this step is not there."""
        place = step % _NUM_PLACES * _PLACE_BYTES
        if os.pwrite(self._fd, frame, place + _HEADER.size) < len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(self._fd, _HEADER.pack(self._epoch, step, len(frame)), place)

    def close(self) -> None:
        os.close(self._fd)


def read_steps(path: str, epoch: int, first: int) -> Iterator[SchedulerOutput]:
    """The steps of that epoch from number `first` on, as far as they were written."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        step = first
        while True:
            file.seek(step % _NUM_PLACES * _PLACE_BYTES)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != (epoch, step):
                return
            yield _decode(file.read(_HEADER.unpack(header)[2]))
            step += 1
