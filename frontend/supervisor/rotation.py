"""The rotation: the replicas that receive new requests, and restarts that wait until a replica is idle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from ...protocol.config import ReplicaRole
from ...protocol.heartbeat import BEAT_INTERVAL_S
from ...protocol.supervisor_messages import (
    NEW_ROLES,
    ReplicaAction,
    ReplicaCommand,
    ReplicaInfo,
    ReplicaState,
)
from .recovery import RecoveryUnit
from .saved_state import SavedReplica

LOAD_UPDATE_INTERVAL_S: Final = 2 * BEAT_INTERVAL_S
"""Seconds after which all frontends have received a drain, and heartbeats count all requests sent before it."""


class Rotation:
    """The states of all replicas, and their roles if there are roles.

    Commands that would leave no serving replica are ignored.
    """

    def __init__(
        self, units: list[RecoveryUnit], timeout_s: float, roles: Sequence[ReplicaRole] = ()
    ) -> None:
        self._places = [_Place(*each) for each in zip_longest(units, roles)]
        self._timeout_s = timeout_s

    def apply_command(self, command: ReplicaCommand, now: float) -> None:
        """Start to drain, restart or undrain a replica, or change its role."""
        if not 0 <= command.replica < len(self._places):
            return
        place = self._places[command.replica]
        if command.action in NEW_ROLES:
            if place.role is not None:
                place.role = NEW_ROLES[command.action]
        elif command.action is ReplicaAction.UNDRAIN:
            place.will_stay_drained = False
            if place.state is not ReplicaState.RESTARTING:
                place.enter(ReplicaState.SERVING, now)
        elif any(other.can_serve for other in self._places if other is not place):
            is_drain = command.action is ReplicaAction.DRAIN
            place.will_stay_drained = is_drain
            place.will_restart |= not is_drain and place.state is not ReplicaState.RESTARTING
            if place.state is ReplicaState.SERVING:
                place.enter(ReplicaState.DRAINING, now)

    def advance(self, now: float) -> None:
        """Perform the state changes that have become possible.

        A restart waits for the replica's sequences until the timeout. Unfinished sequences then continue at another
        replica.
        """
        for place in self._places:
            waited_s = now - place.since
            if place.state is ReplicaState.DRAINING and place.is_idle:
                place.enter(ReplicaState.DRAINED, now)
            if place.will_restart and (
                place.state is ReplicaState.DRAINED
                or (place.state is ReplicaState.DRAINING and waited_s > self._timeout_s)
            ):
                place.will_restart = False
                place.unit.restart(now)
                place.enter(ReplicaState.RESTARTING, now)
            elif place.state is ReplicaState.RESTARTING and place.unit.is_up:
                is_drained = place.will_stay_drained
                place.enter(ReplicaState.DRAINING if is_drained else ReplicaState.SERVING, now)

    @property
    def is_settled(self) -> bool:
        """True if every replica serves, and none is about to restart."""
        return all(
            each.state is ReplicaState.SERVING and not each.will_restart for each in self._places
        )

    def save(self) -> list[SavedReplica]:
        """Return the states of all replicas for another supervisor."""
        return [
            SavedReplica(each.state, each.will_restart, each.will_stay_drained, each.role)
            for each in self._places
        ]

    def restore(self, saved: list[SavedReplica], now: float) -> None:
        """Continue with the states that an earlier supervisor has saved."""
        for place, replica in zip(self._places, saved, strict=True):
            place.enter(replica.state, now)
            place.will_restart = replica.will_restart
            place.will_stay_drained = replica.will_stay_drained
            place.role = replica.role

    def replica_infos(self) -> list[ReplicaInfo]:
        """Return the states of all replicas, in their order."""
        return [place.info(index) for index, place in enumerate(self._places)]


class _Place:
    """One replica in the rotation.

    Attributes:
        since: The time at which it entered its current state (CLOCK_MONOTONIC seconds).
        will_restart: True if it restarts when it has drained.
        will_stay_drained: True if it stays out of the rotation after a restart.
    """

    def __init__(self, unit: RecoveryUnit, role: ReplicaRole | None) -> None:
        self.unit = unit
        self.role = role
        self.state = ReplicaState.SERVING
        self.since = 0.0
        self.will_restart = False
        self.will_stay_drained = False

    def enter(self, state: ReplicaState, now: float) -> None:
        self.state, self.since = state, now
        self.will_restart &= state is not ReplicaState.SERVING

    @property
    def can_serve(self) -> bool:
        return self.state is ReplicaState.SERVING and self.unit.is_up

    @property
    def is_idle(self) -> bool:
        """True if the replica has no request, and holds no block for another replica to fetch."""
        leader = self.unit.children.get(self.unit.leader.name)
        return (
            leader is not None
            and leader.last_beat > self.since + LOAD_UPDATE_INTERVAL_S
            and not leader.progress.num_running
            and not leader.progress.num_waiting
            and not leader.progress.kv_cache_usage
        )

    def info(self, index: int) -> ReplicaInfo:
        leader = self.unit.children.get(self.unit.leader.name)
        progress = None if leader is None else leader.progress
        return ReplicaInfo(
            replica=index,
            state=self.state,
            epoch=self.unit.epoch,
            num_running=progress.num_running if progress else 0,
            num_waiting=progress.num_waiting if progress else 0,
            is_resuming=self.unit.is_resuming,
            is_up=self.unit.is_up,
            has_ended=self.unit.has_ended,
            role=self.role,
        )
