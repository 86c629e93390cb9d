"""The outputs of an encoder on disk: whatever happens to the files, each input gets its outputs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.errors import ConfigError
from engine.workers.execution.inputs.stored_encoder import WRITTEN_BYTES, StoredEncoder

GIB = 1 << 30
CPU = torch.device("cpu")


class Spelling:
    """An encoder whose outputs are the bytes of an input, and which counts its calls."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.num_calls = 0

    def encode(self, data: bytes) -> torch.Tensor:
        self.num_calls += 1
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 2).to(self._dtype)

    def warm_up(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def stored(
    root: Path,
    encoder: Spelling,
    limit: int = GIB,
    fingerprint: bytes = b"f" * 32,
    min_wait_s: float = 60.0,
) -> Iterator[StoredEncoder]:
    """Yield an encoder with this directory. At the end, all outputs are written."""
    store = StoredEncoder(encoder, str(root), limit, fingerprint, CPU, min_wait_s=min_wait_s)
    yield store
    store.close()


def encode(root: Path, encoder: Spelling, data: bytes, **options: Any) -> torch.Tensor:
    with stored(root, encoder, **options) as store:
        return store.encode(data, sha256(data).digest())


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.sealed"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_computed_once_for_all_servers_with_the_same_fingerprint(tmp_path, dtype):
    first, second, other = Spelling(dtype), Spelling(dtype), Spelling(dtype)
    for encoder in (first, second):
        for data in (b"abcd", b"efghij", b"abcd"):
            outputs = encode(tmp_path, encoder, data)
            assert outputs.dtype == dtype
            assert outputs.equal(Spelling(dtype).encode(data))
    encode(tmp_path, other, b"abcd", fingerprint=b"g" * 32)
    assert [each.num_calls for each in (first, second, other)] == [2, 0, 1]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path))


def test_outputs_whose_checksum_ends_in_zero_are_found_again(tmp_path):
    encoder = Spelling()
    inputs = (bytes(divmod(number, 256)) for number in range(1 << 16))
    data = next(each for each in inputs if zlib.crc32(encoder.encode(each).numpy()) % 256 == 0)
    encoder.num_calls = 0
    for _ in range(2):
        encode(tmp_path, encoder, data)
    assert encoder.num_calls == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "head"])
def test_damaged_files_are_replaced(tmp_path, damage):
    encoder = Spelling()
    encode(tmp_path, encoder, b"abcd")
    (path,) = files(tmp_path)
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": content[:-1],
        "changed": content[:-1] + b"\1",
        "head": b"\xff" + content[1:],
    }
    path.write_bytes(damaged[damage])
    for _ in range(2):
        assert encode(tmp_path, encoder, b"abcd").tolist() == [[97, 98], [99, 100]]
    assert encoder.num_calls == 2
    assert path.read_bytes() == content


def test_the_least_recently_used_outputs_are_deleted_first(tmp_path):
    encoder = Spelling()
    limit = 3 * (64 + 16)
    for number, data in enumerate((b"aaaa", b"bbbb", b"cccc", b"aaaa", b"dddd")):
        encode(tmp_path, encoder, data, limit=limit)
        # Give the file that was just written or read the time `number`.
        for path in files(tmp_path):
            if path.stat().st_mtime > 1000:
                os.utime(path, (number, number))
    assert (len(files(tmp_path)), encoder.num_calls) == (3, 4)
    encode(tmp_path, encoder, b"aaaa", limit=limit)
    assert encoder.num_calls == 4
    encode(tmp_path, encoder, b"bbbb", limit=limit)
    assert encoder.num_calls == 5


def test_without_the_directory_outputs_are_computed(tmp_path, caplog):
    encoder = Spelling()
    with stored(tmp_path / "a", encoder) as store:
        shutil.rmtree(tmp_path / "a")
        for data in (b"ab", b"cd"):
            assert store.encode(data, sha256(data).digest()).tolist() == [list(data)]
    assert encoder.num_calls == 2
    assert len(caplog.records) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--encoder-disk .*file"):
        encode(tmp_path / "file" / "b", encoder, b"ab")


def test_outputs_that_wait_to_be_written_are_not_computed_again(tmp_path):
    encoder = Spelling()
    with stored(tmp_path, encoder) as store, hanging_writes(tmp_path):
        for _ in range(2):
            assert store.encode(b"abcd", b"h").tolist() == [[97, 98], [99, 100]]
        assert not files(tmp_path)
    assert encoder.num_calls == 1
    assert len(files(tmp_path)) == 1


def test_only_a_bounded_number_of_bytes_waits_to_be_written(tmp_path):
    encoder, size = Spelling(), WRITTEN_BYTES // 24 * 2
    with stored(tmp_path, encoder) as store, hanging_writes(tmp_path):
        for number in range(5):
            store.encode(bytes([number]) * size, bytes([number]))
    assert encoder.num_calls == 5
    assert len(files(tmp_path)) == 3


def test_an_encoder_does_not_wait_for_a_directory_that_hangs(tmp_path):
    """Opening a named pipe to read it blocks until another process opens it to write."""
    encoder = Spelling()
    inputs = [bytes([number, number]) for number in range(20)]
    with stored(tmp_path, encoder) as store:
        for data in inputs:
            store.encode(data, sha256(data).digest())
    contents = {path: path.read_bytes() for path in files(tmp_path)}
    for path in contents:
        path.unlink()
        os.mkfifo(path)
    with stored(tmp_path, encoder, min_wait_s=0.2) as store:
        start = time.monotonic()
        for data in inputs:
            store.expect(sha256(data).digest())
        for data in inputs:
            assert store.encode(data, sha256(data).digest()).tolist() == [list(data)]
        # Waiting for each file would take 4 s.
        assert time.monotonic() - start < 2
        assert encoder.num_calls == 40
        for path, content in contents.items():
            feed_pipe(path, content)
        # When the reads have ended, files are read again.
        deadline = time.monotonic() + 20
        number = 0
        while encoder.num_calls == 40 + number:
            assert time.monotonic() < deadline
            number += 1
            store.encode(inputs[number % 20], sha256(inputs[number % 20]).digest())


def feed_pipe(path: Path, content: bytes) -> None:
    """Replace a named pipe by a file, and let its readers read the content."""
    pipe = path.rename(path.with_suffix(".pipe"))
    path.write_bytes(content)
    # Without a reader, opening it fails.
    with contextlib.suppress(OSError):
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, content)
        os.close(fd)


@contextlib.contextmanager
def hanging_writes(root: Path) -> Iterator[None]:
    """Hold the lock of the directory, for which writes wait."""
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
