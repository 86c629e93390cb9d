"""The lock of the store's file. One process at a time holds it and describes itself in the lock file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ...protocol.errors import ConfigError

LOCK_S: Final = 10.0
"""Seconds to wait for another process to release the database, such as a predecessor that is exiting."""
LOCK_POLL_S: Final = 0.05

MAX_HOLDER_BYTES: Final = 4096
"""Maximum bytes of the description of the process that holds the lock."""


class Holder(msgspec.Struct, frozen=True):
    """The process that holds the lock.

    Attributes:
        pid: The process ID.
        address: The address at which it accepts guests; "" if it accepts none.
        protocol: The digest of the message formats that it understands.
    """

    pid: int
    address: str = ""
    protocol: str = ""


class FileLock:
    """The lock of one database. The system releases it however its holder exits.

    Args:
        path: The file of the database.
        holder: The description of this process for others, while it holds the lock.

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
        """Try to acquire the lock. Return whether this process holds it now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        content = msgspec.json.encode(self._holder)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        return True

    def acquire(self, may_do_without: Callable[[], bool] = lambda: False) -> bool:
        """Wait until this process holds the lock, or `may_do_without` returns True.

        Return whether it holds the lock.

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
                    f"the store {self._path} is in use by another engine (process {owner}); stop it, or set "
                    "--store to another file"
                )
            time.sleep(LOCK_POLL_S)
        return True

    def read_holder(self) -> Holder | None:
        """Return the process that holds the lock or held it last; None if it has not described itself."""
        try:
            return msgspec.json.decode(os.pread(self._descriptor, MAX_HOLDER_BYTES, 0), type=Holder)
        except msgspec.DecodeError:
            return None

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
