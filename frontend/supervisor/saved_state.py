"""The file from which a supervisor reads which processes an earlier one started, after that one crashed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.config import ReplicaRole
from ...protocol.supervisor_messages import ReplicaState, Stage

NAME: Final = "supervisor.state"


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


class SavedReplica(msgspec.Struct, array_like=True, frozen=True):
    """The place of a replica in the rotation."""

    state: ReplicaState
    will_restart: bool
    will_stay_drained: bool
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
    """The file in the run directory of an engine."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self._saved = b""

    def load(self) -> SavedState | None:
        """Return the state that was saved last; None if there is none."""
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=SavedState)
        except FileNotFoundError:
            return None

    def save(self, state: SavedState) -> None:
        """Replace the saved state, unless it is the same."""
        encoded = msgspec.msgpack.encode(state)
        if encoded == self._saved:
            return
        # Without the run directory, no process can be started either.
        with contextlib.suppress(FileNotFoundError):
            new = self._path.with_suffix(".new")
            new.write_bytes(encoded)
            os.replace(new, self._path)
            self._saved = encoded
