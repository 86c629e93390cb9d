"""The directory that engines on one machine share for KV-cache blocks on disk, with a limit on its size.

It contains one subdirectory of segments per fingerprint, each with one writer at a time. The limit covers all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

OPEN_SUFFIX: Final = ".open"
SEALED_SUFFIX: Final = ".sealed"

_LOCK: Final = "lock"


class SegmentFile(NamedTuple):
    """A segment as found in a directory. `used_at` is the time of its last use, in nanoseconds since 1970."""

    path: str
    size: int
    used_at: int

    @property
    def is_sealed(self) -> bool:
        """True if the segment is complete, so that nothing is appended to it anymore."""
        return self.path.endswith(SEALED_SUFFIX)


def list_segments(directory: Path) -> list[SegmentFile]:
    """Return the segments of one fingerprint."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((OPEN_SUFFIX, SEALED_SUFFIX)):
                # Another process may delete the segment at the same time.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(SegmentFile(entry.path, status.st_size, status.st_mtime_ns))
    return found


def try_lock(path: Path) -> int | None:
    """Lock a file until its descriptor is closed. The file is created if it does not exist.

    Returns:
        The descriptor, or None if another process has locked the file.

    Raises:
        OSError: The file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


class SharedDirectory:
    """The directory of `--kv-disk`.

    All segments in it together have at most `limit_bytes`, regardless of which process wrote them.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def fingerprint_directory(self, fingerprint: bytes) -> Path:
        """Return the directory of one fingerprint, and create it if it does not exist."""
        path = self.root / fingerprint.hex()[:32]
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.contextmanager
    def making_room(self, num_bytes: int) -> Iterator[bool]:
        """Delete the least recently used segments until there is room for `num_bytes`.

        Inside the context, no other process can use this space.

        Yields:
            True if there is enough room.

        Raises:
            OSError: A segment cannot be deleted.
        """
        fd = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield self._make_room(num_bytes)
        finally:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> bool:
        segments = [
            segment
            for entry in os.scandir(self.root)
            if entry.is_dir(follow_symlinks=False)
            for segment in list_segments(Path(entry.path))
        ]
        excess = sum(segment.size for segment in segments) + num_bytes - self.limit_bytes
        for segment in sorted(segments, key=lambda segment: (segment.used_at, segment.path)):
            if excess <= 0:
                break
            if segment.is_sealed or _is_abandoned(segment.path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(segment.path)
                excess -= segment.size
        return excess <= 0


def _is_abandoned(path: str) -> bool:
    """Return whether no process is appending to an unsealed segment."""
    try:
        fd = try_lock(Path(path))
    except OSError:
        return False
    if fd is None:
        return False
    os.close(fd)
    return True
