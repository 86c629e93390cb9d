"""The outputs of an encoder on disk: whatever happens to the files, each input gets its outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine.protocol.errors import ConfigError
from engine.workers.execution.inputs.stored_encoder import StoredEncoder

GIB = 1 << 30
CPU = torch.device("cpu")


class Spelling:
    """An encoder whose outputs are the bytes of an input, and which counts its calls."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.num_calls = 0

    def encode(self, data: bytes) -> torch.Tensor:
        self.num_calls += 1
        return torch.tensor(list(data)).view(-1, 2).to(self._dtype)

    def warm_up(self) -> None:
        """Do nothing."""


def stored(root: Path, encoder: Spelling, limit: int = GIB, fingerprint: bytes = b"f" * 32):
    return StoredEncoder(encoder, str(root), limit, fingerprint, CPU)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.sealed"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_computed_once_for_all_servers_with_the_same_fingerprint(tmp_path, dtype):
    first, second, other = Spelling(dtype), Spelling(dtype), Spelling(dtype)
    for encoder in (first, second):
        for data in (b"abcd", b"efghij", b"abcd"):
            outputs = stored(tmp_path, encoder).encode(data)
            assert outputs.dtype == dtype
            assert outputs.equal(Spelling(dtype).encode(data))
    stored(tmp_path, other, fingerprint=b"g" * 32).encode(b"abcd")
    assert [each.num_calls for each in (first, second, other)] == [2, 0, 1]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path))


def test_any_outputs_are_found_again(tmp_path):
    encoder = Spelling()
    for _ in range(2):
        store = stored(tmp_path, encoder)
        for number in range(600):
            store.encode(bytes(divmod(number, 256)))
    assert encoder.num_calls == 600


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "head"])
def test_damaged_files_are_replaced(tmp_path, damage):
    encoder = Spelling()
    stored(tmp_path, encoder).encode(b"abcd")
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
        assert stored(tmp_path, encoder).encode(b"abcd").tolist() == [[97, 98], [99, 100]]
    assert encoder.num_calls == 2
    assert path.read_bytes() == content


def test_the_least_recently_used_outputs_are_deleted_first(tmp_path):
    encoder = Spelling()
    store = stored(tmp_path, encoder, limit=3 * (64 + 16))
    for number, data in enumerate((b"aaaa", b"bbbb", b"cccc", b"aaaa", b"dddd")):
        store.encode(data)
        # Give the file that was just written or read the time `number`.
        for path in files(tmp_path):
            if path.stat().st_mtime > 1000:
                os.utime(path, (number, number))
    assert (len(files(tmp_path)), encoder.num_calls) == (3, 4)
    store.encode(b"aaaa")
    assert encoder.num_calls == 4
    store.encode(b"bbbb")
    assert encoder.num_calls == 5


def test_without_the_directory_outputs_are_computed(tmp_path, caplog):
    encoder = Spelling()
    store = stored(tmp_path / "a", encoder)
    for path in (tmp_path / "a").iterdir():
        path.rmdir()
    (tmp_path / "a").rmdir()
    for _ in range(2):
        assert store.encode(b"ab").tolist() == [[97, 98]]
    assert encoder.num_calls == 2
    assert len(caplog.records) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--encoder-disk .*file"):
        stored(tmp_path / "file" / "b", encoder)
