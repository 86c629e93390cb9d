"""File URLs name only regular files in one directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine.frontend.media.sources.downloads import MAX_BYTES
from engine.frontend.media.sources.local_files import LocalFiles
from engine.protocol.errors import ParameterError

pytestmark = pytest.mark.unit


def test_files_in_the_directory_are_read_and_others_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "media"
    (root / "sub dir").mkdir(parents=True)
    (root / "sub dir" / "a.png").write_bytes(b"content")
    (root / "inner").symlink_to(root / "sub dir")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret").write_bytes(b"secret")
    (root / "outer").symlink_to(tmp_path / "media2" / "secret")
    os.mkfifo(root / "pipe")
    with open(root / "large", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    files = LocalFiles(str(root))
    for url in (
        f"file://{root}/sub%20dir/a.png",
        f"FILE://localhost{root}/inner/../sub%20dir/a.png",
    ):
        assert files.read(url, "url") == b"content"
    outside = "--allowed-local-media-path"
    for url, words in (
        (f"file://{root}/outer", outside),
        (f"file://{root}/../media2/secret", outside),
        (f"file://{root}2/secret", outside),
        (f"file://{root}/%2e%2e/media2/secret", outside),
        ("file:///etc/hostname", outside),
        (f"file://host{root}/inner/a.png", outside),
        (f"file://{root}/a%00b", "not a valid URL"),
        (f"file://{root}/missing", "cannot be read: No such file"),
        (f"file://{root}/sub%20dir", "cannot be read: Is a directory"),
        (f"file://{root}/pipe", "regular file"),
        (f"file://{root}/large", f"more than {MAX_BYTES} bytes"),
    ):
        with pytest.raises(ParameterError, match="url") as caught:
            files.read(url, "url")
        assert words in str(caught.value), url
