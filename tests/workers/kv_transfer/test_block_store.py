"""The store of blocks on disk: whatever happens to its files, it returns the correct block or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from engine.workers.kv_transfer.disk.block_store import BlockStore
from engine.workers.kv_transfer.disk.directory import SharedDirectory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.suite.examples import examples

BLOCK_BYTES = 200
LIMIT = 80_000
"""Room for 63 segments of three blocks, and one that is being written."""
FINGERPRINT = b"f" * 32


def open_store(path: Path, fingerprint: bytes = FINGERPRINT, limit: int = LIMIT) -> BlockStore:
    store = BlockStore(SharedDirectory(path, limit), fingerprint, BLOCK_BYTES)
    store.refresh()
    return store


def key_of(number: int) -> bytes:
    digest = sha256(b"%d" % number).digest()
    return digest if number % 2 else digest + b"\1"


def block_of(number: int, fingerprint: bytes = FINGERPRINT) -> bytes:
    content = sha256(fingerprint + b"block %d" % number).digest()
    return (content * 7)[:BLOCK_BYTES]


def append(store: BlockStore, number: int, fingerprint: bytes = FINGERPRINT) -> bool:
    return store.append(key_of(number), memoryview(block_of(number, fingerprint)))


def read(store: BlockStore, number: int) -> bytes | None:
    parts = [bytearray(BLOCK_BYTES // 2), bytearray(BLOCK_BYTES // 2)]
    found = store.read(key_of(number), [memoryview(part) for part in parts])
    return b"".join(parts) if found else None


def read_together(store: BlockStore, numbers: list[int]) -> list[bytes | None]:
    blocks = [bytearray(BLOCK_BYTES) for _ in numbers]
    found = store.read_blocks(list(map(key_of, numbers)), [[memoryview(each)] for each in blocks])
    return [
        bytes(block) if is_found else None for block, is_found in zip(blocks, found, strict=True)
    ]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


NUMBERS = st.integers(0, 299)


class Crashes(RuleBasedStateMachine):
    """A writer that crashes at any byte, a concurrent reader, and files that change under both."""

    @initialize()
    def begin(self) -> None:
        self.directory = TemporaryDirectory()
        self.removed: set[int] = set()
        self.damages = self.generation = 0
        self.open(Path(self.directory.name) / "0")

    def open(self, path: Path) -> None:
        self.path = path
        self.store, self.reader = open_store(path), open_store(path)

    def close(self) -> None:
        self.store.close()
        self.reader.close()

    @rule(numbers=st.lists(NUMBERS, max_size=100))
    def append(self, numbers: list[int]) -> None:
        for number in numbers:
            assert append(self.store, number)
            self.removed.discard(number)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        for store in (self.store, self.reader):
            was_there = key_of(number) in store
            found = read(store, number)
            assert found in (None, block_of(number))
            if number in self.removed:
                assert found is None
            if store is self.store and was_there and not self.damages:
                assert found is not None

    @rule(numbers=st.lists(NUMBERS, max_size=20), first=NUMBERS)
    def read_together(self, numbers: list[int], first: int) -> None:
        """Read blocks of which some may follow each other."""
        numbers = [*numbers, *range(first, first + 5)]
        were_there = [key_of(number) in self.store for number in numbers]
        found = read_together(self.store, numbers)
        for number, block, was_there in zip(numbers, found, were_there, strict=True):
            assert block in (None, block_of(number))
            if was_there and not self.damages:
                assert block is not None

    @rule()
    def refresh(self) -> None:
        self.reader.refresh()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3))
    def remove(self, numbers: list[int]) -> None:
        self.store.remove(map(key_of, numbers))
        self.removed.update(numbers)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert not len(self.store)

    @rule(lost=st.integers(0, 600))
    def crash(self, lost: int) -> None:
        """Continue with the files as they are now, except the last `lost` bytes that the writer has written."""
        self.generation += 1
        path = Path(self.directory.name) / str(self.generation)
        shutil.copytree(self.path, path)
        self.close()
        for tail in path.rglob("*.open"):
            size, num_written = tail.stat().st_size, len(tail.read_bytes().rstrip(b"\0"))
            os.truncate(tail, max(num_written - lost, 0))
            os.truncate(tail, size)
        self.damages += 1
        self.open(path)

    @rule(where=st.integers(0, 1 << 30), bit=st.integers(0, 7))
    def flip_bit(self, where: int, bit: int) -> None:
        files = [file for file in sorted(self.path.rglob("*.sealed")) if file.stat().st_size]
        if files:
            file = files[where % len(files)]
            data = bytearray(file.read_bytes())
            data[where % len(data)] ^= 1 << bit
            file.write_bytes(data)
            self.damages += 1

    @rule(where=st.integers(0, 1 << 30))
    def cut(self, where: int) -> None:
        files = sorted(self.path.rglob("*.sealed"))
        if files:
            file = files[where % len(files)]
            os.truncate(file, where % (file.stat().st_size + 1))
            self.damages += 1

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "path"):
            assert size_of(self.path) <= LIMIT

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.close()
            self.directory.cleanup()


Crashes.TestCase.settings = examples(40, stateful_step_count=25)
TestCrashes = Crashes.TestCase


def test_blocks_are_found_after_the_store_is_opened_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(10):
        append(store, number)
    store.close()
    again = open_store(tmp_path)
    assert [read(again, number) for number in range(11)] == [*map(block_of, range(10)), None]
    assert set(again.take_changes().added) == set(map(key_of, range(10)))
    again.close()


def test_the_least_recently_used_segments_are_deleted_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    removed: list[bytes] = []
    for number in range(1000):
        append(store, number)
        assert size_of(tmp_path) <= LIMIT
        if number == 100:
            assert read(store, 0) is not None
            store.refresh()
        removed += store.take_changes().removed
        if removed:
            break
    assert read(store, 0) is not None
    assert set(removed) == {key_of(3), key_of(4), key_of(5)}
    assert read(store, 3) is None
    store.close()


def test_fingerprints_share_the_bound_but_no_blocks(tmp_path: Path) -> None:
    first, other = open_store(tmp_path), open_store(tmp_path, b"g" * 32)
    append(first, 1)
    assert read(other, 1) is None
    for number in range(300):
        assert append(other, number, b"g" * 32)
        assert size_of(tmp_path) <= LIMIT
    assert read(other, 299) == block_of(299, b"g" * 32)
    # Segments that another process is writing are not deleted to free space.
    assert read(first, 1) == block_of(1)
    first.close()
    other.close()


def test_a_reader_finds_what_the_writer_appends_and_takes_over_after_it(tmp_path: Path) -> None:
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    append(writer, 1)
    assert not append(reader, 2)
    reader.refresh()
    assert read(reader, 1) == block_of(1)
    writer.close()
    reader.refresh()
    assert append(reader, 2)
    assert [read(reader, 1), read(reader, 2)] == [block_of(1), block_of(2)]
    reader.close()


def test_a_bound_without_room_for_a_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="300 bytes are too few for a segment with one block, which has 456"
    ):
        open_store(tmp_path, limit=300)


def test_a_killed_process_loses_no_block_that_was_appended(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from engine.workers.kv_transfer.disk.block_store import BlockStore\n"
        "from engine.workers.kv_transfer.disk.directory import SharedDirectory\n"
        f"store = BlockStore(SharedDirectory(Path(sys.argv[1]), {LIMIT}), b'f' * 32, 200)\n"
        "store.refresh()\n"
        "store.append(b'k' * 32, memoryview(b'd' * 200))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], check=False)
    store = open_store(tmp_path)
    data = bytearray(200)
    assert store.read(b"k" * 32, [memoryview(data)]) and data == b"d" * 200
    store.close()


@pytest.mark.parametrize("damage", ["a byte", "the end"])
def test_only_the_damaged_block_of_those_that_are_read_together_is_missing(
    tmp_path: Path, damage: str
) -> None:
    store = open_store(tmp_path, limit=LIMIT * 10)
    for number in range(6):
        assert append(store, number)
    store.close()
    (path,) = tmp_path.rglob("*.sealed")
    store = open_store(tmp_path, limit=LIMIT * 10)
    data = path.read_bytes()
    place = data.index(block_of(4))
    if damage == "a byte":
        path.write_bytes(data[:place] + b"?" + data[place + 1 :])
    else:
        os.truncate(path, place)
    missing = {4} if damage == "a byte" else {4, 5}
    expected = [None if number in missing else block_of(number) for number in range(6)]
    assert read_together(store, list(range(6))) == expected
    assert [key_of(number) in store for number in range(6)] == [
        number not in missing for number in range(6)
    ]
    store.close()
