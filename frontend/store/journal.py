"""The journal of a frontend: entries that it has recorded and the store has not committed yet.

It is a file in shared memory or on disk, mapped into the memory of the frontend. So an entry survives a crash of any
process as soon as it is copied there, which takes a microsecond and no system call. The frontend may then send
entries to the store in larger batches, and need not wait for it. When the session of a frontend that has exited ends,
the store applies the entries that it has not received.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.store.requests import LogEntry
from ...protocol.transport import UNREADABLE

logger = logging.getLogger(__name__)

HALF_BYTES: Final = 2 * 1024 * 1024
"""Size of each half of a journal, which holds more than a second of tokens of 1,000 streams with 1 ms steps."""

_HEADER: Final = struct.Struct("<II")
"""The start and the length of the entries in bytes. It is written after them, so it never names an incomplete one."""

_SIZE: Final = struct.Struct("<I")
"""The size of an entry, before each."""

_DATA: Final = 64
"""Offset of the first half."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(LogEntry).decode


def journal_path(config: EngineConfig, session: bytes) -> Path:
    """Return the path of the journal of a session: beside the store, so that it is kept as long as the store."""
    path = config.store.path
    if path is None:
        return Path(config.run_dir, f"journal-{session.hex()}")
    return Path(f"{os.path.realpath(path)}-journal-{session.hex()}")


class Journal:
    """The journal of this process.

    Raises:
        OSError: The file cannot be created, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        size = _DATA + 2 * HALF_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Without space, a write to the mapping would end the process.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._path = path
        self._start = self._end = _DATA

    def append(self, entry: LogEntry) -> bool:
        """Add an entry. Return False if there is no room."""
        if not self._write(entry, self._start + HALF_BYTES):
            return False
        self._publish()
        return True

    def keep(self, entries: Iterable[LogEntry]) -> bool:
        """Replace all entries by some of them. Return False if there is no room for them."""
        before = self._start, self._end
        self._start = self._end = _DATA + HALF_BYTES if self._start == _DATA else _DATA
        if not all(self._write(entry, self._start + HALF_BYTES) for entry in entries):
            self._start, self._end = before
            return False
        self._publish()
        return True

    @property
    def is_filling(self) -> bool:
        """True if the half that is in use is half full."""
        return self._end - self._start > HALF_BYTES // 2

    def close(self, *, is_complete: bool) -> None:
        """Close the file, and delete it if the store has committed everything. Otherwise the store deletes it."""
        self._map.close()
        if is_complete:
            self._path.unlink(missing_ok=True)

    def _write(self, entry: LogEntry, limit: int) -> bool:
        encoded = _encode(entry)
        end = self._end + _SIZE.size + len(encoded)
        if end > limit:
            return False
        self._map[self._end : end] = _SIZE.pack(len(encoded)) + encoded
        self._end = end
        return True

    def _publish(self) -> None:
        _HEADER.pack_into(self._map, 0, self._start, self._end - self._start)


def read_journal(path: Path) -> Iterator[LogEntry]:
    """Yield the entries of the journal of a process that has exited, up to one that cannot be read."""
    try:
        data = memoryview(path.read_bytes())
        start, length = _HEADER.unpack_from(data)
        entries = data[start : start + length]
        while entries:
            end = _SIZE.size + _SIZE.unpack_from(entries)[0]
            yield _decode(entries[_SIZE.size : end])
            entries = entries[end:]
    except FileNotFoundError:
        pass
    except (OSError, struct.error, *UNREADABLE) as error:
        logger.warning("the journal %s cannot be read: %s", path, error)
