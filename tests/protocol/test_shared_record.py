"""A record is read once, whole or not at all, whatever its size and whoever opened it first."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from engine.protocol.errors import RunDirectoryError
from engine.protocol.shared_record import RecordReader, RecordWriter


class Text(msgspec.Struct):
    """A message of any size."""

    text: str


def test_each_message_is_read_once_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reader = RecordReader(path, Text)
    assert reader.read() is None
    path.touch()
    assert reader.read() is None
    writer = RecordWriter(path)
    assert reader.read() is None
    for size in (3, 3, 100_000, 0, 1_000_000):
        before = time.monotonic()
        writer.write(Text("x" * size))
        assert reader.read() == Text("x" * size)
        assert before <= reader.written_at <= time.monotonic()
        assert reader.read() is None
    # Another process continues the record of an earlier one, and running processes do without the directory.
    successor = RecordWriter(path)
    path.unlink()
    successor.write(Text("next"))
    assert reader.read() == Text("next")
    for each in (writer, successor, reader):
        each.close()


def test_a_half_written_message_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    writer, reader = RecordWriter(path), RecordReader(path, Text)
    writer.write(Text("old"))
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(whole.index(b"old"))
        file.write(b"n")
    assert reader.read() is None
    writer.write(Text("new"))
    assert reader.read() == Text("new")
    writer.close()
    reader.close()


def test_a_record_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="none/record: No such file or directory"):
        RecordWriter(tmp_path / "none" / "record")
