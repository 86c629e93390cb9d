"""The state of a supervisor survives its crash, also in a full run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from engine.frontend.supervisor.saved_state import (
    NAME,
    SavedProcess,
    SavedState,
    SavedUnit,
    StateFile,
)
from engine.protocol.shared_record import RecordWriter
from engine.protocol.supervisor_messages import Stage


def state_of(pid: int, detail: str = "") -> SavedState:
    process = SavedProcess("core 0", pid, 1, Stage.READY, detail)
    return SavedState(True, False, [SavedUnit(1, 0, {"core 0": pid}, [process])], [], [])


def test_the_newest_complete_state_is_read(tmp_path: Path) -> None:
    assert StateFile(tmp_path).load() is None
    for pid in range(1, 6):
        # Each supervisor writes one state and crashes.
        file = StateFile(tmp_path)
        expected = None if pid == 1 else state_of(pid - 1)
        assert file.load() == expected
        file.save(state_of(pid))
    file.save(state_of(6))
    newest = max(tmp_path.glob(f"{NAME}.*"), key=lambda path: b"\x06" in path.read_bytes())
    damaged = bytearray(newest.read_bytes())
    damaged[20] ^= 1
    newest.write_bytes(damaged)
    assert StateFile(tmp_path).load() == state_of(5)


def test_a_full_file_system_does_not_end_the_supervisor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        (tmp_path / f"{NAME}.{number}").symlink_to("/dev/full")
    file = StateFile(tmp_path)
    file.save(state_of(1))
    file.save(state_of(2))
    assert caplog.text.count("cannot be saved") == 1


def test_a_state_of_another_version_is_ignored(tmp_path: Path) -> None:
    class Other(msgspec.Struct, array_like=True):
        value: str

    RecordWriter(tmp_path / f"{NAME}.0").write(Other("x"))
    assert StateFile(tmp_path).load() is None
