"""Locate the directories for files that are expensive to create or download again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ..protocol.errors import ConfigError


def cache_directory(kind: str) -> Path:
    """Return the directory in which to write cached files of this kind; it may not exist yet."""
    return cache_directories(kind)[-1]


def cache_directories(kind: str) -> list[Path]:
    """Return the directories to search for cached files of this kind; the last one can be written.

    It is `$ENGINE_CACHE/KIND`, by default `engine/KIND` in the user's cache directory. If that cannot be written, as in
    a container with a read-only file system, a directory among the temporary files follows.

    Raises:
        ConfigError: Other users could write to the directory among the temporary files.
    """
    if configured := os.environ.get("ENGINE_CACHE"):
        return [Path(os.path.expanduser(configured)) / kind]
    try:
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        # The user has no home directory.
        return [_temporary_directory() / kind]
    directory = user_cache / "engine" / kind
    return [directory] if _can_write(directory) else [directory, _temporary_directory() / kind]


def _can_write(directory: Path) -> bool:
    # Unlike Path.exists, this also works below directories that may not be read.
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


def _temporary_directory() -> Path:
    """Create and return a directory of this user's own, which all processes of the user find."""
    path = Path(tempfile.gettempdir()) / f"engine-cache-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{path} could be written by other users; remove it, or set ENGINE_CACHE to another directory"
        )
    return path
