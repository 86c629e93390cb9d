"""The lock of the store's file: one process at a time has it, and the file of the lock says which one."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ...protocol.errors import ConfigError

LOCK_S: Final = 10.0
"""Seconds to wait for another process to release the database, for example a predecessor that is exiting."""
LOCK_POLL_S: Final = 0.05

MAX_HOLDER_BYTES: Final = 4096
"""Maximum size of a description of the process that has the lock."""


class Holder(msgspec.Struct, frozen=True):
    """The process that has the lock.

    Attributes:
        pid: Its process ID.
        address: Where it receives messages; "" if it does not.
        protocol: The digest of the messages that it understands.
    """

    pid: int
    address: str = ""
    protocol: str = ""


class FileLock:
    """The lock of one database, which the system releases however its holder exits.

    Args:
        path: The file of the database.
        holder: What others read about this process while it has the lock.

    Raises:
        ConfigError: The lock file cannot be created.
    """

    def __init__(self, path: str, holder: Holder | None = None) -> None:
        self._path = path
        self._holder = holder or Holder(os.getpid())
        name = f"{path}.lock"
        try:
            self._descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot create {name}: {error.strerror}; set --store to a file in a writable directory"
            ) from None

    def try_acquire(self) -> bool:
        """Return whether this process has the lock now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        content = msgspec.json.encode(self._holder)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        return True

    def acquire(self, may_do_without: Callable[[], bool] = lambda: False) -> bool:
        """Wait until this process has the lock or may do without it. Return whether it has the lock.

        Raises:
            ConfigError: Another process keeps the lock.
        """
        deadline = time.monotonic() + LOCK_S
        while not self.try_acquire():
            if may_do_without():
                return False
            if time.monotonic() > deadline:
                holder = self.read_holder()
                owner = "unknown" if holder is None else holder.pid
                raise ConfigError(
                    f"the store {self._path} is in use by process {owner} of another engine; stop that one or set "
                    "--store to another file"
                )
            time.sleep(LOCK_POLL_S)
        return True

    def read_holder(self) -> Holder | None:
        """Return the process that has the lock, or had it last; None if it has not said who it is."""
        try:
            return msgspec.json.decode(os.pread(self._descriptor, MAX_HOLDER_BYTES, 0), type=Holder)
        except msgspec.DecodeError:
            return None

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
