"""A file with the last steps that a core has sent, which its workers read after the core has crashed.

A core sends a step to one worker after the other, and may crash in between. Each step is written to the file before it
is sent. After a crash, workers that did not receive the last step read it from the file. The others, which wait for
them inside that step, can then complete it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from struct import Struct
from typing import Final

import msgspec

from .errors import RunDirectoryError
from .transport import MAX_FRAME_BYTES
from .worker_messages import SchedulerOutput

_NUM_PLACES: Final = 16
"""Ring capacity in steps; must exceed the number of steps in flight."""

_HEADER: Final = Struct("<QQQ")
"""Header of an entry: epoch, step, length of the frame. It never crosses a page, so a crash cannot leave part of it."""

_PLACE_BYTES: Final = _HEADER.size + MAX_FRAME_BYTES
"""Size in bytes that is reserved for an entry. Unwritten parts take no disk space."""

_decode = msgspec.msgpack.Decoder(SchedulerOutput).decode


class StepLog:
    """Writes the step log of one epoch.

    Raises:
        RunDirectoryError: The file cannot be created.
    """

    def __init__(self, path: str, epoch: int) -> None:
        self._epoch = epoch
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise RunDirectoryError(path, error.strerror) from error

    def append(self, step: int, frame: bytes) -> None:
        """Write a step.

        Raises:
            OSError: The disk is full; the step is not in the log.
        """
        place = step % _NUM_PLACES * _PLACE_BYTES
        if os.pwrite(self._fd, frame, place + _HEADER.size) < len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(self._fd, _HEADER.pack(self._epoch, step, len(frame)), place)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_steps(path: str, epoch: int, first: int) -> Iterator[SchedulerOutput]:
    """Yield the logged steps of an epoch, from number `first` on."""
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
