"""The file from which a supervisor reads which processes an earlier one started, after that one crashed."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.config import ReplicaRole
from ...protocol.errors import RunDirectoryError
from ...protocol.shared_record import RecordReader, RecordWriter
from ...protocol.supervisor_messages import ReplicaState, Stage

logger = logging.getLogger(__name__)

NAME: Final = "supervisor.state"
RESERVED_BYTES: Final = 32 * 1024
"""Size of each file. The state of a hundred processes needs about 5 KiB."""


class SavedProcess(msgspec.Struct, array_like=True, frozen=True):
    """A process that was started, and the last stage that it reported."""

    name: str
    pid: int
    epoch: int
    stage: Stage
    detail: str


class SavedUnit(msgspec.Struct, array_like=True, frozen=True):
    """A recovery unit. `num_failures` are its consecutive failures before the current one."""

    epoch: int
    num_failures: int
    num_restarts: dict[str, int]
    processes: list[SavedProcess]
    is_asleep: bool = False


class SavedReplica(msgspec.Struct, array_like=True, frozen=True):
    """The place of a replica in the rotation."""

    state: ReplicaState
    will_restart: bool
    will_stay_drained: bool
    wakes_on_request: bool
    role: ReplicaRole | None


class SavedState(msgspec.Struct, array_like=True, frozen=True):
    """The state from which a supervisor continues the work of an earlier one.

    The units and replicas are in the order of the configuration. `poison_bodies` are the digests of bodies that crashed
    frontends.
    """

    was_ready: bool
    is_retiring: bool
    units: list[SavedUnit]
    replicas: list[SavedReplica]
    poison_bodies: list[bytes]


class StateFile:
    """The state in the run directory of an engine.

    Two records are written alternately, so that one is complete whenever the supervisor crashes. Their space is
    reserved, because the file system may be full when a process is lost.
    """

    def __init__(self, run_dir: Path) -> None:
        self._paths = [run_dir / f"{NAME}.{number}" for number in range(2)]
        self._writers: list[RecordWriter] = []
        self._next = 0
        self._saved = b""
        self._has_failed = False

    def load(self) -> SavedState | None:
        """Return the state that was saved last; None if there is none, or this version cannot read it."""
        newest, found = 0.0, None
        for number, path in enumerate(self._paths):
            reader = RecordReader(path, SavedState)
            with contextlib.suppress(msgspec.DecodeError):
                state = reader.read()
                if state is not None and reader.written_at > newest:
                    newest, found, self._next = reader.written_at, state, 1 - number
            reader.close()
        return found

    def save(self, state: SavedState) -> None:
        """Replace the saved state, unless it is the same. If that fails, log a warning."""
        encoded = msgspec.msgpack.encode(state)
        if encoded == self._saved:
            return
        try:
            if not self._writers:
                self._writers = [RecordWriter(path, RESERVED_BYTES) for path in self._paths]
            self._writers[self._next].write(state)
        except (OSError, RunDirectoryError) as error:
            if not self._has_failed:
                logger.warning("the state of the supervisor cannot be saved: %s", error)
            self._has_failed = True
            return
        self._next = 1 - self._next
        self._saved, self._has_failed = encoded, False
