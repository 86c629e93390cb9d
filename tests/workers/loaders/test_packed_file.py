import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine.workers.loaders.stored.packed_file import LEAST_BYTES, Description, PackedFile
from numpy.typing import NDArray

LIMIT = 3 * LEAST_BYTES
DESCRIPTIONS: list[Description] = [("q", 1, 4, 2, 0, 1.0), ("k", 8, 3, 2, 32, 0.5)]


class Matrix(msgspec.Struct):
    array: NDArray[np.uint8]


def matrices(first: int = LEAST_BYTES) -> list[Matrix]:
    generator = np.random.default_rng(0)
    return [Matrix(generator.integers(0, 256, size, np.uint8)) for size in (first, 4099)]


def opened(directory: Path, key: bytes = b"a" * 32) -> PackedFile:
    return PackedFile(directory / "packed", key, LIMIT)


def write(directory: Path, key: bytes = b"a" * 32, first: int = LEAST_BYTES) -> PackedFile:
    file = opened(directory, key)
    for description, matrix in zip(DESCRIPTIONS, matrices(first), strict=True):
        assert file.take(description) is None
        file.keep(description, matrix)
    file.settle().join()
    return file


def is_complete(file: PackedFile) -> bool:
    found = [file.take(description) for description in DESCRIPTIONS]
    return all(
        array is not None and np.array_equal(array, matrix.array)
        for array, matrix in zip(found, matrices(), strict=True)
    )


def test_a_later_start_maps_the_matrices_that_an_earlier_one_packed(tmp_path: Path) -> None:
    assert not write(tmp_path).mapped_bytes
    file = opened(tmp_path)
    assert is_complete(file)
    # Moving to huge pages changes no byte, and leaves the file as it is.
    file.settle().join()
    assert is_complete(opened(tmp_path))
    other = opened(tmp_path, b"b" * 32)
    assert other.take(DESCRIPTIONS[0]) is None


def test_a_mapped_matrix_keeps_its_content_on_huge_pages_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    file = opened(tmp_path)
    expected = matrices()[0].array
    array = file.take(DESCRIPTIONS[0])
    assert array is not None
    thread = file.settle()
    while thread.is_alive():
        assert np.array_equal(array, expected)
    assert np.array_equal(array, expected)
    array[:] = 0
    assert is_complete(opened(tmp_path))


def test_replicas_that_start_together_write_the_file_once(tmp_path: Path) -> None:
    replicas = [opened(tmp_path) for _ in range(2)]
    for file in replicas:
        for description, matrix in zip(DESCRIPTIONS, matrices(), strict=True):
            file.keep(description, matrix)
    for thread in [file.settle() for file in replicas]:
        thread.join()
    path = replicas[0].path
    assert list(path.parent.iterdir()) == [path]
    written = path.stat()
    # One that did not find the file finds it now.
    late = opened(tmp_path / "other")
    late.path = path
    late.keep(DESCRIPTIONS[0], matrices()[0])
    late.settle().join()
    assert path.stat().st_ino == written.st_ino
    assert is_complete(opened(tmp_path))


def test_matrices_in_another_order_are_packed_again(tmp_path: Path) -> None:
    write(tmp_path)
    file = opened(tmp_path)
    assert file.take(DESCRIPTIONS[1]) is None
    assert file.take(DESCRIPTIONS[0]) is None


@pytest.mark.parametrize("kept_bytes", [0, 10, LEAST_BYTES, -1])
def test_a_truncated_file_is_written_again(tmp_path: Path, kept_bytes: int) -> None:
    path = write(tmp_path).path
    os.truncate(path, kept_bytes % path.stat().st_size)
    assert not write(tmp_path).mapped_bytes
    assert is_complete(opened(tmp_path))


def test_a_damaged_index_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path).path
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert not opened(tmp_path).mapped_bytes


def test_files_of_other_models_make_room_the_least_recently_used_first(tmp_path: Path) -> None:
    first, second = write(tmp_path).path, write(tmp_path, b"b" * 32).path
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert opened(tmp_path).mapped_bytes
    third = write(tmp_path, b"c" * 32).path
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    assert not write(tmp_path, b"d" * 32, LIMIT).path.exists()
    assert first.exists()
    assert third.exists()


def test_small_models_are_packed_at_each_start(tmp_path: Path) -> None:
    assert not write(tmp_path, first=1000).path.exists()
