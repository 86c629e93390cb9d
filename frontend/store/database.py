"""The SQLite database of the store: its file, its versions, and its failures."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Final

from ...protocol.errors import ConfigError
from .file_lock import LOCK_S, FileLock

logger = logging.getLogger(__name__)

APPLICATION_ID: Final = 0x454E4731
"""The SQLite application ID, which marks a file as a database of Engine."""

RETRY_S: Final = 5.0
"""Seconds between attempts to write to a file that could not be written."""

WAL_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes of the write-ahead log after a checkpoint."""

MEMORY: Final = ":memory:"

MIGRATIONS: Final = (
    """
    CREATE TABLE objects (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        owner TEXT NOT NULL,
        parent TEXT NOT NULL,
        created REAL NOT NULL,
        changed REAL NOT NULL,
        size INTEGER NOT NULL,
        data BLOB NOT NULL
    );
    CREATE UNIQUE INDEX object_ids ON objects (kind, id, owner);
    CREATE INDEX object_parents ON objects (kind, owner, parent, position);
    CREATE INDEX object_ages ON objects (changed);
    """,
    """
    CREATE TABLE requests (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        key TEXT NOT NULL,
        session BLOB NOT NULL,
        numbers BLOB NOT NULL,
        num_starts INTEGER NOT NULL,
        claimed_at INTEGER NOT NULL,
        is_finished INTEGER NOT NULL,
        created REAL NOT NULL,
        changed REAL NOT NULL,
        size INTEGER NOT NULL,
        state BLOB NOT NULL
    );
    CREATE UNIQUE INDEX request_ids ON requests (owner, id);
    CREATE INDEX request_keys ON requests (owner, key) WHERE key != '';
    CREATE INDEX unfinished_requests ON requests (position) WHERE NOT is_finished;
    CREATE INDEX request_ages ON requests (changed) WHERE is_finished;
    CREATE TABLE records (owner TEXT NOT NULL, id TEXT NOT NULL, record BLOB NOT NULL, UNIQUE (owner, id));
    CREATE TABLE sessions (
        id BLOB PRIMARY KEY, run TEXT NOT NULL, client INTEGER NOT NULL, last_number INTEGER NOT NULL
    );
    CREATE TABLE log (position INTEGER PRIMARY KEY, session BLOB NOT NULL, entry BLOB NOT NULL);
    """,
    """
    ALTER TABLE sessions ADD COLUMN duties BLOB NOT NULL DEFAULT x'90';
    """,
)
"""Script i changes a database of version i to version i + 1. A new database has version 0."""

_DAMAGE: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class Database:
    """A connection to the database, for the process that has its lock.

    Without a path, or if the file is damaged, the database is in memory. If the file cannot be written, `trouble` is
    the reason, and writing is tried again every `RETRY_S` seconds.

    A commit survives the crash of any process, but not of the machine (`synchronous=NORMAL`): it is a write to the log
    that does not wait for the disk. After a power failure the last commits may be missing, but the database is
    consistent.

    Args:
        path: The file; None for a database in memory.
        lock: The lock of the file if the caller holds it; if None, the constructor waits for the lock.

    Raises:
        ConfigError: The file cannot be opened, belongs to another program or a newer version, or is in use.
    """

    def __init__(self, path: str | None, lock: FileLock | None = None) -> None:
        self.trouble = ""
        self._path = path
        self._lock = lock
        self._retry_at = 0.0
        self._latest_change = 0.0
        if path is None:
            self.connection = _connect(MEMORY)
            _migrate(self.connection, MEMORY)
            return
        if lock is None:
            self._lock = lock = FileLock(path)
            try:
                lock.acquire()
            except ConfigError:
                lock.close()
                raise
        try:
            self.connection = _open_file(path)
        except ConfigError:
            lock.close()
            raise
        except sqlite3.DatabaseError as error:
            if _code(error) not in _DAMAGE:
                lock.close()
                raise ConfigError(f"cannot open the store {path}: {error}; check --store") from None
            self._continue_in_memory(error)

    def time_of_change(self) -> float:
        """Return the time of a change that is made now, in seconds since 1970. It is never before an earlier change.

        If the clock of the system is set back, the latest change must not become the oldest, which is evicted first.
        """
        self._latest_change = max(self._latest_change, time.time())
        return self._latest_change

    @property
    def is_file(self) -> bool:
        """True if the database is in a file, although it may not be writable at the moment."""
        return self._path is not None

    @property
    def may_write(self) -> bool:
        """True if an attempt to write may succeed."""
        return not self.trouble or (self.is_file and time.monotonic() >= self._retry_at)

    def write(self, work: Callable[[], None]) -> bool:
        """Run `work` in a transaction and commit it. Return False if that failed; then the database is unchanged."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                work()
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self.record_failure(error)
            return False
        if self.trouble and self.is_file:
            logger.warning("the store %s is writable again", self._path)
            self.trouble = ""
        return True

    def record_failure(self, error: sqlite3.Error) -> None:
        """Record that a statement failed. If the file is damaged, stop using it."""
        self._retry_at = time.monotonic() + RETRY_S
        if _code(error) in _DAMAGE and self.is_file:
            self.connection.close()
            self._continue_in_memory(error)
        elif not self.trouble:
            self.trouble = f"{self._path or 'the store in memory'} cannot be written: {error}"
            logger.error("%s; requests continue without durability", self.trouble)

    def give_back_pages(self, num_pages: int) -> None:
        """Return up to `num_pages` free pages of the file to the file system."""
        try:
            self.connection.execute(f"PRAGMA incremental_vacuum({num_pages})").fetchall()
        except sqlite3.Error as error:
            self.record_failure(error)

    def close(self) -> None:
        """Close the connection and release the lock."""
        self.connection.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _continue_in_memory(self, error: sqlite3.Error) -> None:
        self.trouble = f"{self._path} is damaged ({error}) and is no longer used"
        logger.error(
            "%s; requests continue without durability: move the file away and restart the server",
            self.trouble,
        )
        self._path = None
        self.connection = _connect(MEMORY)
        _migrate(self.connection, MEMORY)


def _code(error: sqlite3.Error) -> int:
    """Return the primary result code of an error; 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=LOCK_S)


def _open_file(path: str) -> sqlite3.Connection:
    """Open the file, and create or update its tables to this version.

    Raises:
        ConfigError: The file cannot be created, or belongs to another program or a newer version.
        sqlite3.DatabaseError: The file is damaged or cannot be written.
    """
    try:
        # SQLite creates its other files with the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"cannot open the store {path}: {error.strerror}; set --store to a writable file"
        ) from None
    connection = _connect(path)
    try:
        # No other process may open the file, so the index of the log needs no shared memory.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _migrate(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    """Create the tables, or update tables of an older version."""
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [num_tables] = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (application or version or num_tables):
        raise ConfigError(f"{path} is another program's database; set --store to a separate file")
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"{path} was written by a newer version of Engine (format {version}, this version reads formats "
            f"up to {len(MIGRATIONS)}); use that version, or set --store to another file"
        )
    if version < len(MIGRATIONS):
        scripts = "".join(MIGRATIONS[version:])
        connection.executescript(
            f"PRAGMA auto_vacuum = INCREMENTAL; BEGIN; {scripts} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {len(MIGRATIONS)}; COMMIT;"
        )
