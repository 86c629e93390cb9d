"""The rotation: the replicas that receive new requests, and those that restart or sleep once they are idle."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from ...protocol.config import ReplicaRole
from ...protocol.config.weights import WeightsFiles
from ...protocol.heartbeat import BEAT_INTERVAL_S
from ...protocol.supervisor_messages import (
    NEW_ROLES,
    ReplicaAction,
    ReplicaCommand,
    ReplicaInfo,
    ReplicaState,
    UpdateWeights,
)
from .child import Child
from .recovery import RecoveryUnit
from .saved_state import SavedReplica

logger = logging.getLogger(__name__)

LOAD_UPDATE_INTERVAL_S: Final = 2 * BEAT_INTERVAL_S
"""Seconds after which all frontends have received a drain, and heartbeats count all requests sent before it."""


UNLOAD_S: Final = 5.0
"""Seconds for which an UNLOAD waits until all replicas are idle. It has no effect if they are not."""


class Rotation:
    """The states of all replicas, and their roles if there are roles.

    Commands to drain or restart that would leave no serving replica are ignored. All replicas sleep once none has had a
    request for `sleep_idle_s` seconds, unless that is None. `weights` names the weights with which they start.
    """

    def __init__(
        self,
        units: list[RecoveryUnit],
        timeout_s: float,
        weights: WeightsFiles,
        roles: Sequence[ReplicaRole] = (),
        sleep_idle_s: float | None = None,
    ) -> None:
        self._weights = weights
        self._is_updating = weights.is_updating
        self._places = [_Place(*each) for each in zip_longest(units, roles)]
        self._timeout_s = timeout_s
        self._sleep_idle_s = sleep_idle_s
        self._idle_since: float | None = None
        self._unloads_until = 0.0
        self._num_steps = 0

    def apply_command(self, command: ReplicaCommand | UpdateWeights, now: float) -> bool:
        """Start to drain, restart, undrain or wake a replica, let it sleep, or change its role or all weights.

        Returns:
            False if the command has no effect.
        """
        if isinstance(command, UpdateWeights):
            return self._update_weights(command, now)
        if not 0 <= command.replica < len(self._places):
            return False
        place = self._places[command.replica]
        before = place.described()
        self._apply(command, place, now)
        return place.described() != before

    def _apply(self, command: ReplicaCommand, place: _Place, now: float) -> None:
        if command.action is ReplicaAction.SLEEP:
            self._sleep(self._linked_to(place), now, wakes_on_request=False)
        elif command.action is ReplicaAction.WAKE:
            self._wake(self._linked_to(place), now)
        elif command.action is ReplicaAction.UNLOAD:
            self._unloads_until = now + UNLOAD_S
        elif place.state in (ReplicaState.SLEEPING, ReplicaState.WAKING):
            pass
        elif command.action in NEW_ROLES:
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

    def _linked_to(self, place: _Place) -> list[_Place]:
        """Return the replicas that sleep and wake together with this one: all that divide the model's experts."""
        return self._places if place.unit.peers else [place]

    def _sleep(self, places: Sequence[_Place], now: float, *, wakes_on_request: bool) -> None:
        for place in places:
            place.wakes_on_request = wakes_on_request
            if place.state is not ReplicaState.SLEEPING:
                place.enter(ReplicaState.SLEEPING, now)
                place.will_restart = place.will_stay_drained = False
                place.unit.sleep(now)

    def _wake(self, places: Sequence[_Place], now: float) -> None:
        sleeping = [place for place in places if place.state is ReplicaState.SLEEPING]
        # Workers of replicas that divide experts connect to those of the same epoch.
        epoch = 1 + max((place.unit.epoch for place in sleeping), default=0)
        for place in sleeping:
            if place.unit.peers:
                place.unit.next_epoch = epoch
            place.wakes_on_request = False
            place.enter(ReplicaState.WAKING, now)
            place.unit.wake(now)

    def _update_weights(self, command: UpdateWeights, now: float) -> bool:
        """Restart the replicas that do not sleep with other weights, if none changes its state at present.

        Replicas that sleep load them when they wake.
        """
        known = self._weights.read_current(), self._weights.read_failed()
        if not self.is_settled or command.weights.update_id in [each.update_id for each in known]:
            return False
        try:
            self._weights.begin(command.weights)
        except OSError as error:
            logger.error("the weights cannot be updated: %s", error)
            return False
        self._is_updating = True
        self._reload(now)
        return True

    def _reload(self, now: float) -> None:
        places = [each for each in self._places if each.state is not ReplicaState.SLEEPING]
        self._sleep(places, now, wakes_on_request=False)
        self._wake(places, now)

    def revert_weights(self, child: Child, now: float) -> bool:
        """Return to the previous weights, because a process that has exited could not load the current ones.

        Returns:
            False if its replica does not load weights at present.
        """
        is_loading = any(
            place.state is ReplicaState.WAKING and child in place.unit.children.values()
            for place in self._places
        )
        if not (self._is_updating and is_loading):
            return False
        self._weights.revert(child.exit_summary())
        self._is_updating = False
        self._reload(now)
        return True

    def find_idle(self, now: float) -> bool:
        """Return whether all replicas serve, and no request has come for so long that they may sleep."""
        limit_s = 0.0 if now < self._unloads_until else self._sleep_idle_s
        if limit_s is None:
            return False
        num_steps = sum(place.num_steps for place in self._places)
        if num_steps != self._num_steps or not all(
            place.can_serve and place.is_idle for place in self._places
        ):
            self._num_steps, self._idle_since = num_steps, None
        elif self._idle_since is None:
            self._idle_since = now
        return self._idle_since is not None and now - self._idle_since >= limit_s

    def advance(self, now: float, *, may_sleep: bool) -> bool:
        """Perform the state changes that have become possible. Before the engine was ready, no replica may sleep.

        A restart waits for the replica's sequences until the timeout. Unfinished sequences then continue at another
        replica.

        Returns:
            True if the replicas go to sleep, because they are idle.
        """
        if is_idle := may_sleep and self.find_idle(now):
            self._idle_since, self._unloads_until = None, 0.0
            self._sleep(self._places, now, wakes_on_request=True)
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
            elif place.state is ReplicaState.WAKING and place.unit.is_up:
                place.enter(ReplicaState.SERVING, now)
        if (
            self._is_updating
            and any(place.can_serve for place in self._places)
            and all(
                place.can_serve or place.state is ReplicaState.SLEEPING for place in self._places
            )
        ):
            self._is_updating = False
            self._weights.end()
        return is_idle

    @property
    def is_settled(self) -> bool:
        """True if every replica serves or sleeps, and none is about to restart."""
        return all(
            each.state in (ReplicaState.SERVING, ReplicaState.SLEEPING) and not each.will_restart
            for each in self._places
        )

    def save(self) -> list[SavedReplica]:
        """Return the states of all replicas for another supervisor."""
        return [
            SavedReplica(
                each.state,
                each.will_restart,
                each.will_stay_drained,
                each.wakes_on_request,
                each.role,
            )
            for each in self._places
        ]

    def restore(self, saved: list[SavedReplica], now: float) -> None:
        """Continue with the states that an earlier supervisor has saved."""
        for place, replica in zip(self._places, saved, strict=True):
            place.enter(replica.state, now)
            place.will_restart = replica.will_restart
            place.will_stay_drained = replica.will_stay_drained
            place.wakes_on_request = replica.wakes_on_request
            place.role = replica.role
        if self._is_updating:
            # Some replicas may still have the previous weights.
            self._reload(now)

    def replica_infos(self) -> list[ReplicaInfo]:
        """Return the states of all replicas, in their order."""
        return [place.info(index) for index, place in enumerate(self._places)]


class _Place:
    """One replica in the rotation.

    Attributes:
        since: The time at which it entered its current state (CLOCK_MONOTONIC seconds).
        will_restart: True if it restarts when it has drained.
        will_stay_drained: True if it stays out of the rotation after a restart.
        wakes_on_request: True if it sleeps only until the next request.
    """

    def __init__(self, unit: RecoveryUnit, role: ReplicaRole | None) -> None:
        self.unit = unit
        self.role = role
        self.state = ReplicaState.SERVING
        self.since = 0.0
        self.will_restart = False
        self.will_stay_drained = False
        self.wakes_on_request = False

    def described(self) -> tuple[object, ...]:
        """Return what a command can change."""
        return (
            self.state,
            self.role,
            self.will_restart,
            self.will_stay_drained,
            self.wakes_on_request,
        )

    def enter(self, state: ReplicaState, now: float) -> None:
        self.state, self.since = state, now
        self.will_restart &= state is not ReplicaState.SERVING

    @property
    def can_serve(self) -> bool:
        return self.state is ReplicaState.SERVING and self.unit.is_up

    @property
    def num_steps(self) -> int:
        """The number of steps that the core has reported."""
        leader = self.unit.children.get(self.unit.leader.name)
        return 0 if leader is None else leader.progress.num_steps

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
            wakes_on_request=self.wakes_on_request,
        )
