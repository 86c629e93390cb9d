"""Packed matrices in a file of the user's cache, from which later starts of a worker map them.

The file has the matrices, an index, and a trailer. Matrices begin at multiples of 64 bytes. It is written under another
name and renamed when it is complete, so a file with the right name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...device.host_memory import map_file, move_to_huge_pages

logger = logging.getLogger(__name__)

LEAST_BYTES: Final = 16 << 20
"""Size of the smallest file. Packing less takes only milliseconds."""

_ALIGNMENT: Final = 64
_TRAILER: Final = struct.Struct("<QI4s")
"""The offset of the index, its CRC-32, and `_MAGIC`."""
_MAGIC: Final = b"EPW1"
_PIECE_BYTES: Final = 8 << 20

Description: TypeAlias = tuple[str, int, int, int, int, float]
"""The name, format, rows and columns of a matrix, and the fields `group` and `scale` of its `PackedWeight`."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    description: Description
    offset: int
    size: int


class Packed(Protocol):
    """A packed matrix."""

    array: NDArray[np.uint8]


class PackedFile:
    """The packed matrices of one worker, in the order in which it reads them.

    If there is no file, `keep` remembers the matrices, and `settle` writes them.

    Attributes:
        path: The file, which may not exist.

    Args:
        directory: The directory of all such files.
        key: A hash of all that determines the matrices, 32 bytes.
        limit_bytes: The limit on the size of all files in the directory.
    """

    def __init__(self, directory: Path, key: bytes, limit_bytes: int) -> None:
        self.path = directory / f"{key.hex()[:32]}.packed"
        self._limit_bytes = limit_bytes
        self._data = np.empty(0, np.uint8)
        self._entries: list[_Entry] = []
        self._kept: list[tuple[Description, Packed]] = []
        with _unless_damaged(), self.path.open("rb") as file:
            entries, num_bytes = _read_index(file)
            self._data = map_file(file.fileno(), num_bytes)
            self._entries = entries[::-1]
            # The file that was not used for longest is deleted first.
            os.utime(self.path)

    @property
    def mapped_bytes(self) -> int:
        """The size of the matrices in the file; 0 if there is none."""
        return len(self._data)

    def take(self, description: Description) -> NDArray[np.uint8] | None:
        """Return the next matrix of the file if it is this one, else None."""
        if not self._entries:
            return None
        entry = self._entries.pop()
        if entry.description != description:
            self._entries = []
            return None
        return self._data[entry.offset : entry.offset + entry.size]

    def keep(self, description: Description, weight: Packed) -> None:
        """Remember a matrix that was packed, for `settle`. It may be filled later."""
        if not len(self._data):
            self._kept.append((description, weight))

    def settle(self) -> threading.Thread:
        """Start a thread that writes the matrices, or moves those of the file to huge pages. Return it.

        Steps may run meanwhile. Writing uses a tenth of a CPU core, and moving a quarter.
        """
        thread = threading.Thread(target=self._settle, name="settle", daemon=True)
        thread.start()
        return thread

    def _settle(self) -> None:
        if len(self._data):
            move_to_huge_pages(self._data)
            return
        kept, self._kept = self._kept, []
        size = sum(len(weight.array) + _ALIGNMENT for _, weight in kept)
        if not LEAST_BYTES <= size <= self._limit_bytes:
            return
        try:
            self._write(kept, size)
        except OSError as error:
            logger.info("cannot keep the packed weights in %s: %s", self.path, error.strerror)

    def _write(self, kept: list[tuple[Description, Packed]], size: int) -> None:
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(scratch, flags, 0o600), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another replica is writing it.
                return
            # Another replica may have renamed or deleted it before it was locked.
            if self._is_whole() or not os.path.samestat(os.fstat(file.fileno()), scratch.stat()):
                return
            try:
                self._make_room(size)
                # More than half of what is free would hurt programs that need the disk.
                if shutil.disk_usage(directory).free >= 2 * size:
                    _write_matrices(file, kept)
                    scratch.rename(self.path)
            finally:
                scratch.unlink(missing_ok=True)

    def _is_whole(self) -> bool:
        with _unless_damaged(), self.path.open("rb") as file:
            _read_index(file)
            return True
        return False

    def _make_room(self, size: int) -> None:
        """Delete the files that were not used for longest until there is room for `size` bytes."""
        files = [
            (path.stat(), path)
            for path in self.path.parent.iterdir()
            if path.suffix in (".packed", ".new") and path.stem != self.path.stem
        ]
        total = size + sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda found: found[0].st_mtime_ns):
            if total <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


def _unless_damaged() -> contextlib.suppress:
    """Return a context that suppresses the errors of a missing or damaged file."""
    return contextlib.suppress(OSError, ValueError, struct.error, msgspec.MsgspecError)


def _read_index(file: IO[bytes]) -> tuple[list[_Entry], int]:
    """Return the entries of a file, and the size of its matrices.

    Raises:
        OSError: It cannot be read, or another user owns it.
        ValueError, struct.error, msgspec.MsgspecError: It is damaged.
    """
    status = os.fstat(file.fileno())
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError
    file.seek(max(0, status.st_size - _TRAILER.size))
    offset, checksum, magic = _TRAILER.unpack(file.read())
    file.seek(offset)
    index = file.read()[: -_TRAILER.size]
    if magic != _MAGIC or zlib.crc32(index) != checksum:
        raise ValueError
    return msgspec.msgpack.decode(index, type=list[_Entry]), offset


def _write_matrices(file: IO[Any], kept: list[tuple[Description, Packed]]) -> None:
    file.truncate(0)
    entries = []
    for description, weight in kept:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        entries.append(_Entry(description, file.tell(), len(weight.array)))
        for start in range(0, len(weight.array), _PIECE_BYTES):
            begin = time.perf_counter()
            file.write(weight.array[start : start + _PIECE_BYTES].data)
            time.sleep(9 * (time.perf_counter() - begin))
    offset = file.tell()
    index = msgspec.msgpack.encode(entries)
    file.write(index + _TRAILER.pack(offset, zlib.crc32(index), _MAGIC))
    file.flush()
    os.fsync(file.fileno())
