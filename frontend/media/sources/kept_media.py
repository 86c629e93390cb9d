"""Images, videos and audio that clients have named, so that later requests can refer to them by the name."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 << 20
"""Maximum bytes of all kept media of a server."""
MAX_FILES: Final = 4096
"""Maximum number of kept media of a server."""


class KeptMedia:
    """A directory of media, which all frontends of a server share. The least recently used ones are deleted."""

    def __init__(
        self, directory: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES
    ) -> None:
        """Store the limits. The directory is created with the first file."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_files = max_files

    def store(self, key: str, content: bytes) -> None:
        """Keep a file under `key`, a valid file name. It is not kept if it exceeds the limit or the disk is full."""
        path = self._directory / key
        if self.load(key) == content:
            return
        # The file is larger than the limit, or writing it may fail. Its predecessor must not stay under this key.
        path.unlink(missing_ok=True)
        if len(content) > self._max_bytes:
            return
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._make_room(len(content))
            self._write(path, content)
        except OSError as error:
            logger.warning("could not keep a named image, video or audio file: %s", error)

    def load(self, key: str) -> bytes | None:
        """Return the file that is kept under `key`, and mark it as used; None if there is none."""
        path = self._directory / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return content

    def clear(self) -> None:
        """Delete all files."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                # Another frontend may have deleted the file.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def _write(self, path: Path, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used files until another one of `num_bytes` fits."""
        found: list[tuple[int, int, str]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                # Another frontend may have deleted the file.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        found.sort(reverse=True)
        total = num_bytes + sum(size for _, size, _ in found)
        while found and (total > self._max_bytes or len(found) >= self._max_files):
            _, size, path = found.pop()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
