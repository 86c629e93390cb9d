"""The step log can be read up to its last complete step, whenever the core exited."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from engine.protocol.errors import RunDirectoryError
from engine.protocol.step_log import StepLog, read_steps
from engine.protocol.transport import encode
from engine.protocol.worker_messages import SchedulerOutput

EPOCH = 3


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "core0.steps")


def write(path: str, epoch: int, last: int) -> None:
    log = StepLog(path, epoch)
    for step in range(1, last + 1):
        # The steps have very different sizes, as prompts do.
        log.append(step, encode(SchedulerOutput(step, slots=bytes(4 * step * 1000 % 70_000))))
    log.close()


def numbers(path: str, epoch: int, first: int) -> list[int]:
    return [step.step for step in read_steps(path, epoch, first)]


def test_the_last_steps_are_read_in_order(path: str) -> None:
    write(path, EPOCH, 100)
    steps = list(read_steps(path, EPOCH, 95))
    assert [step.step for step in steps] == [95, 96, 97, 98, 99, 100]
    assert [len(step.slots or b"") for step in steps] == [
        4 * n * 1000 % 70_000 for n in range(95, 101)
    ]
    assert numbers(path, EPOCH, 101) == []


def test_a_file_is_private_and_no_larger_than_its_content(path: str) -> None:
    write(path, EPOCH, 100)
    status = os.stat(path)
    assert status.st_blocks * 512 < 4 << 20
    assert status.st_mode & 0o077 == 0


def test_steps_of_another_epoch_are_ignored(path: str) -> None:
    write(path, EPOCH, 5)
    assert numbers(path, EPOCH + 1, 1) == []
    write(path, EPOCH + 1, 2)
    assert numbers(path, EPOCH + 1, 1) == [1, 2]
    assert numbers(path, EPOCH, 1) == []


def test_an_incomplete_step_is_not_read(path: str, monkeypatch) -> None:
    log = StepLog(path, EPOCH)
    for step in range(1, 21):
        log.append(step, encode(SchedulerOutput(step)))

    write_at = os.pwrite
    numbers_of_bytes: list[int] = []

    def fail_at_the_second(fd: int, data: bytes, position: int) -> int:
        numbers_of_bytes.append(len(data))
        if len(numbers_of_bytes) > 1:
            raise KeyboardInterrupt
        return write_at(fd, data, position)

    # The frame is written, but not the header that counts it.
    monkeypatch.setattr(os, "pwrite", fail_at_the_second)
    frame = encode(SchedulerOutput(21))
    with pytest.raises(KeyboardInterrupt):
        log.append(21, frame)
    assert numbers_of_bytes[0] == len(frame)
    monkeypatch.undo()
    log.close()
    assert numbers(path, EPOCH, 19) == [19, 20]


def test_a_file_that_cannot_be_created_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "file" / "core0.steps"
    path.parent.touch()
    with pytest.raises(
        RunDirectoryError, match=r"core0\.steps: Not a directory; free some space"
    ) as error:
        StepLog(str(path), EPOCH)
    assert str(path) in str(error.value)


def test_a_step_that_does_not_fit_on_the_disk_is_not_read(path: str) -> None:
    log = StepLog(path, EPOCH)
    log.append(16, encode(SchedulerOutput(16)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.append(32, encode(SchedulerOutput(32, slots=bytes(8000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append(33, encode(SchedulerOutput(33)))
    log.close()
    assert numbers(path, EPOCH, 32) == []
    assert numbers(path, EPOCH, 33) == [33]


def test_a_missing_file_has_no_steps(path: str) -> None:
    assert numbers(path, EPOCH, 1) == []
