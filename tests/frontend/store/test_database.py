"""The file of the store has one owner and one format. If it fails, the service continues without durability."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from engine.frontend.store import database, file_lock
from engine.frontend.store.database import MIGRATIONS, Database
from engine.protocol.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def put(store: Database, name: str) -> bool:
    def work() -> None:
        store.connection.execute(
            "INSERT INTO objects (kind, id, owner, parent, created, changed, size, data) "
            "VALUES ('k', ?, '', '', 0, 0, 0, x'00')",
            (name,),
        )

    return store.write(work)


def names(store: Database) -> list[str]:
    return [name for (name,) in store.connection.execute("SELECT id FROM objects ORDER BY id")]


def test_a_file_keeps_what_was_committed_and_only_its_owner_reads_it(path: str) -> None:
    store = Database(path)
    assert put(store, "a") and not put(store, "a")
    store.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    again = Database(path)
    assert names(again) == ["a"] and not again.trouble
    again.close()


def test_a_file_in_use_is_refused_with_the_process_that_uses_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "LOCK_S", 0.1)
    store = Database(path)
    with pytest.raises(ConfigError, match=f"in use by another engine \\(process {os.getpid()}\\)"):
        Database(path)
    store.close()
    Database(path).close()


def test_the_lock_ends_with_a_killed_process(path: str) -> None:
    program = (
        "import signal\n"
        "from engine.frontend.store.database import Database\n"
        f"store = Database({path!r})\n"
        "print('open', flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        process.kill()
        process.wait()
        Database(path).close()


def test_other_databases_and_newer_versions_are_refused(path: str) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE important (x)")
    with pytest.raises(ConfigError, match="another program's database"):
        Database(path)
    os.unlink(path)
    Database(path).close()
    with closing(sqlite3.connect(path)) as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match="was written by a newer version of Engine"):
        Database(path)


def test_every_older_version_is_migrated(path: str) -> None:
    for version in range(1, len(MIGRATIONS) + 1):
        with closing(sqlite3.connect(path)) as old:
            old.executescript(
                "".join(MIGRATIONS[:version])
                + f"PRAGMA application_id = {database.APPLICATION_ID}; PRAGMA user_version = {version};"
                "INSERT INTO objects (kind, id, owner, parent, created, changed, size, data) "
                "VALUES ('k', 'kept', '', '', 0, 0, 0, x'00');"
            )
        store = Database(path)
        assert names(store) == ["kept"]
        [version_now] = store.connection.execute("PRAGMA user_version").fetchone()
        assert version_now == len(MIGRATIONS)
        store.close()
        os.unlink(path)


@pytest.mark.parametrize(
    "damage", [b"no database at all" * 100, b"SQLite format 3\0" + bytes(5000)]
)
def test_a_damaged_file_is_left_alone(
    path: str, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    Path(path).write_bytes(damage)
    store = Database(path)
    assert "is damaged" in store.trouble and len(caplog.records) == 1
    assert put(store, "a") and names(store) == ["a"]
    assert "is damaged" in store.trouble
    store.close()
    assert Path(path).read_bytes() == damage


def test_a_full_disk_ends_durability_until_there_is_room(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    store = Database(path)
    assert put(store, "before")
    [num_pages] = store.connection.execute("PRAGMA page_count").fetchone()
    # SQLite reports this limit as it reports a full disk.
    store.connection.execute(f"PRAGMA max_page_count = {num_pages}")
    stored = [f"{number:04}" * 100 for number in range(100)]
    while stored and put(store, stored[0]):
        stored.pop(0)
    assert stored and "disk is full" in store.trouble
    assert not put(store, stored[0])
    assert "before" in names(store)
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    store.connection.execute("PRAGMA max_page_count = 100000")
    assert store.may_write and put(store, stored[0]) and not store.trouble
    store.close()
