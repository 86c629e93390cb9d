"""Named media are kept within limits, the most recently used ones longest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine.frontend.media.sources.kept_media import KeptMedia

pytestmark = pytest.mark.unit


def test_the_least_recently_used_media_are_deleted_first(tmp_path: Path) -> None:
    directory = tmp_path / "media"
    kept, other = (KeptMedia(directory, max_bytes=10, max_files=3) for _ in range(2))
    assert kept.load("a") is None
    for i, key in enumerate("abc"):
        kept.store(key, b"123")
        os.utime(directory / key, (i, i))
    assert other.load("a") == b"123"
    other.store("d", b"1")
    assert [kept.load(key) for key in "abcd"] == [b"123", None, b"123", b"1"]
    kept.store("d", b"1" * 10)
    assert [kept.load(key) for key in "acd"] == [None, None, b"1" * 10]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_media_over_the_limit_replace_older_ones_without_being_kept(tmp_path: Path) -> None:
    kept = KeptMedia(tmp_path, max_bytes=10)
    kept.store("a", b"123")
    kept.store("a", b"1" * 11)
    assert kept.load("a") is None and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptMedia(tmp_path / "missing" / "media")
    kept.store("a", b"123")
    assert kept.load("a") is None and "could not keep" in caplog.text
