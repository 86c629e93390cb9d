"""The journal of bodies that are being parsed."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.frontend.supervisor.parse_journal import DIGEST_BYTES, ParseJournal, read_journal

ONE, TWO = b"1" * DIGEST_BYTES, b"2" * DIGEST_BYTES


def test_a_journal_is_read_once_and_its_space_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = ParseJournal(path)
    journal.end_parsing(journal.begin_parsing(ONE))
    journal.begin_parsing(TWO)
    assert read_journal(path) == {TWO}
    assert read_journal(path) == set()
    inode = path.stat().st_ino
    ParseJournal(path).begin_parsing(ONE)
    assert read_journal(path) == {ONE} and path.stat().st_ino == inode


def test_a_frontend_starts_in_a_full_run_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    path.symlink_to("/dev/full")
    journal = ParseJournal(path)
    journal.end_parsing(journal.begin_parsing(ONE))
    assert "cannot be recorded" in caplog.text
