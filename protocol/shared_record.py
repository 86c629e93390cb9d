"""A record: the newest message of one process, in a small file that is mapped into memory.

Readers look at it when they need it. A message over a socket would wake a thread of the sender, and two of each
receiver.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from pathlib import Path
from struct import Struct
from typing import Final, Generic, TypeVar

import msgspec

from .errors import RunDirectoryError

T = TypeVar("T")

_HEADER: Final = Struct("<II")
"""The checksum of the rest, and the number of bytes of the rest. A reader ignores what is half written."""

_WRITTEN_AT: Final = Struct("<d")

_encode: Final = msgspec.msgpack.Encoder().encode


class RecordWriter:
    """Writes a record. The file gets at least `size` bytes, whose space is then reserved.

    Raises:
        RunDirectoryError: The file cannot be created.
    """

    def __init__(self, path: str | Path, size: int = mmap.PAGESIZE) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._memory = self._map(size)
        except OSError as error:
            raise RunDirectoryError(path, error.strerror) from error

    def write(self, message: msgspec.Struct) -> None:
        """Replace the message, and store the time.

        Raises:
            OSError: A large message does not fit into the file system.
        """
        rest = _WRITTEN_AT.pack(time.monotonic()) + _encode(message)
        record = _HEADER.pack(zlib.crc32(rest), len(rest)) + rest
        if len(record) > len(self._memory):
            self._memory = self._map(2 * len(record))
        self._memory[: len(record)] = record

    def close(self) -> None:
        """Close the file, which remains."""
        self._memory.close()
        os.close(self._fd)

    def _map(self, size: int) -> mmap.mmap:
        """Return the memory of the file, which has at least `size` bytes afterwards."""
        old_size = os.fstat(self._fd).st_size
        if old_size < size:
            # Without space for it, a later write to the memory would end the process.
            os.pwrite(self._fd, bytes(size - old_size), old_size)
        return mmap.mmap(self._fd, 0)


class RecordReader(Generic[T]):
    """Reads a record, whose file need not exist yet.

    Attributes:
        written_at: The time at which the message that was read last was written (CLOCK_MONOTONIC seconds).

    Args:
        path: The path of the file.
        kind: The type of the message.
    """

    def __init__(self, path: str | Path, kind: type[T]) -> None:
        self.written_at = 0.0
        self._path = path
        self._fd = -1
        self._memory: mmap.mmap | None = None
        self._header = b""
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def read(self) -> T | None:
        """Return the message, or None if it was read before or there is none.

        Raises:
            msgspec.DecodeError: The message is invalid.
        """
        if self._memory is None and not self._open():
            return None
        assert self._memory is not None
        header = self._memory[: _HEADER.size]
        if header == self._header:
            return None
        checksum, size = _HEADER.unpack(header)
        end = _HEADER.size + size
        if end > len(self._memory):
            self._memory = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        rest = self._memory[_HEADER.size : end]
        if zlib.crc32(rest) != checksum or len(rest) < _WRITTEN_AT.size:
            return None
        self._header = header
        (self.written_at,) = _WRITTEN_AT.unpack_from(rest)
        return self._decode(rest[_WRITTEN_AT.size :])

    def close(self) -> None:
        """Close the file."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._fd)

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            self._memory = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            # The writer has created the file, but not filled it yet.
            os.close(self._fd)
            return False
        return True
