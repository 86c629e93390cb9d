"""The directory that holds the sockets of one running engine or router."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ...protocol.config import CONFIG_FILE
from ...protocol.errors import ConfigError

PREFIX = "engine-"
ROUTER_FILE = "router"
"""A file in the directory of a router, which has no configuration of an engine."""
MAX_SOCKET_PATH_BYTES = 107
LOCK_TRIES = 100
_LONGEST_SOCKET_NAME = f"{PREFIX}xxxxxxxx/core9999.workers"


class RunDirectory:
    """A private directory (mode 0700) that exists as long as its engine.

    The owner holds a lock on it, which the system releases however the owner exits. A directory without a lock is
    left over, and the next engine that starts deletes it. The lock also keeps programs that clean temporary files
    away.

    A process that inherits `lock_fd` holds the lock as well. Frontends do, so that other engines can detect whether any
    remaining frontend may still continue requests.
    """

    def __init__(self) -> None:
        base = _base_directory()
        _sweep()
        self.path, self.lock_fd = _create_locked(base)

    def remove(self) -> None:
        """Delete the directory and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def run_directories() -> list[Path]:
    """Return the run directories of this user's engines and routers, including those of ones that have exited."""
    return [path for path in _base_directory().glob(f"{PREFIX}????????") if _looks_like_ours(path)]


def is_in_use(path: Path) -> bool:
    """Return whether the engine or router of a run directory runs, or one of its frontends."""
    lock = _try_lock(path)
    if lock is not None:
        os.close(lock)
    return lock is None and path.exists()


def _base_directory() -> Path:
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp"]
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        longest = len(os.fsencode(os.path.join(candidate, _LONGEST_SOCKET_NAME)))
        if longest <= MAX_SOCKET_PATH_BYTES and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise ConfigError(
        "there is no directory for sockets: XDG_RUNTIME_DIR, TMPDIR and /tmp are not writable or have "
        f"paths longer than {MAX_SOCKET_PATH_BYTES - len(_LONGEST_SOCKET_NAME) - 1} bytes; set TMPDIR to a "
        "writable directory with a shorter path"
    )


def _create_locked(base: Path) -> tuple[str, int]:
    for _ in range(LOCK_TRIES):
        try:
            path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        except OSError as error:
            raise ConfigError(
                f"cannot create a directory for sockets in {base}: {error.strerror}; free some space there, "
                "or set XDG_RUNTIME_DIR to another directory"
            ) from None
        lock = _try_lock(path)
        if lock is not None:
            return path, lock
        # Another engine that starts may have locked it, to delete it if it is left over.
        with suppress(OSError):
            os.rmdir(path)
    raise ConfigError(
        f"cannot lock a directory in {base}: its file system may have no locks (flock); set XDG_RUNTIME_DIR to a "
        "directory on a local disk"
    )


def _try_lock(path: str | Path) -> int | None:
    """Return an open descriptor that holds the lock on the directory at `path`, or None if it is locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have locked, removed and released the directory between the two calls.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep() -> None:
    for path in run_directories():
        lock = _try_lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _looks_like_ours(path: Path) -> bool:
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return False
        names = os.listdir(path)
    except OSError:
        return False
    return not names or CONFIG_FILE in names or ROUTER_FILE in names
