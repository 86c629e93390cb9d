"""Receive the supervisor's status in a frontend, and send commands to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq

from ...protocol.config import EngineConfig
from ...protocol.config.weights import ReplacedWeights
from ...protocol.heartbeat import BEAT_INTERVAL_S
from ...protocol.supervisor_messages import (
    NEW_ROLES,
    EngineStatus,
    ProcessInfo,
    ReplicaAction,
    ReplicaCommand,
    ReplicaInfo,
    ReplicaState,
    Stage,
    UpdateWeights,
)
from ...protocol.transport import StatusReporter, StatusSubscriber

ANSWER_S = 5.0
"""Maximum seconds for the supervisor to execute a command."""
STATUS_S = 2.0
"""Maximum seconds that a restarted frontend waits for the supervisor's status before it serves."""
ANSWER_POLL_S = 0.02
"""Seconds between checks whether the first status has come, or one that shows the result of a command."""

SILENCE_S = 3 * BEAT_INTERVAL_S
"""Seconds without a heartbeat after which a process counts as stalled. The supervisor kills it later."""

LONG_STEP_S = 30.0
"""Seconds after which requests that wait for a step leave the replica, and new ones go to others."""


class EngineWatch:
    """Reads the newest `EngineStatus` when needed, and whenever it changes; passes each one to `on_status`.

    It must be used on the event loop on which it was created.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        on_status: Callable[[EngineStatus], None],
    ) -> None:
        self._subscriber = StatusSubscriber(context, config)
        self._reporter = StatusReporter(context, config, "a frontend")
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._subscriber.socket.FD, self._read)
        self._heartbeat_timeout_s = config.recovery.heartbeat_timeout_s
        self._status = EngineStatus([])

    @property
    def status(self) -> EngineStatus:
        """The newest state of the engine."""
        self._read()
        return self._status

    async def wait_for_status(self) -> None:
        """Wait for the first status, which lists the request bodies that crashed earlier frontends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                while not self.status.processes:
                    await asyncio.sleep(ANSWER_POLL_S)

    def close(self) -> None:
        """Close the connections to the supervisor."""
        self._loop.remove_reader(self._subscriber.socket.FD)
        self._subscriber.close()
        self._reporter.close()

    async def send_command(self, replica: int, action: ReplicaAction) -> ReplicaInfo:
        """Send a command for a replica and wait until it takes effect.

        Raises:
            TimeoutError: The supervisor did not execute it.
        """
        self.request(replica, action)
        async with asyncio.timeout(ANSWER_S):
            while True:
                await asyncio.sleep(ANSWER_POLL_S)
                info = self.status.replicas[replica]
                if _has_begun(action, info):
                    return info

    def request(self, replica: int, action: ReplicaAction) -> None:
        """Send a command for a replica."""
        self._reporter.send_command(ReplicaCommand(replica, action))

    def request_weights(self, weights: ReplacedWeights) -> None:
        """Send a command to load other weights on all replicas."""
        self._reporter.send_command(UpdateWeights(weights))

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames from the supervisor."""
        return self._subscriber.num_dropped_frames

    def report_cause_found(self) -> None:
        """Report that a request was failed as the cause of crashes."""
        self._reporter.report_cause_found()

    def is_up(self, replica: int) -> bool:
        """Return whether a replica can compute, according to the latest status."""
        replicas = self.status.replicas
        return bool(replicas) and replicas[replica].is_up

    def find_stalled_process(self) -> str:
        """Return the process that keeps every replica from making progress, with the reason.

        Return "" while at least one replica works. Other frontends are ignored, because clients can connect to those
        that respond.
        """
        age_s = self._read()
        if age_s > SILENCE_S and self._status.processes:
            return f"supervisor: silent for {age_s:.1f} s"
        degraded, serving = self.find_degraded_replicas(), self._serving()
        if not serving or serving != degraded.keys():
            return ""
        return next(iter(degraded.values()))

    def find_degraded_replicas(self) -> dict[int, str]:
        """Return the replicas that should serve but make no progress, with the responsible process."""
        age_s, serving = self._read(), self._serving()
        degraded: dict[int, str] = {}
        # Report processes that do not run first, because others may be waiting for them.
        for process in sorted(self._status.processes, key=lambda p: (p.pid != 0, p.replica or 0)):
            if process.replica in serving and (reason := _why_stalled(process, age_s)):
                degraded.setdefault(process.replica, reason)
        return degraded

    def find_stuck_replicas(self) -> set[int]:
        """Return the replicas of which a process is silent, does not run, or has taken long for its current step."""
        stuck = set(self.find_degraded_replicas())
        for process in self._status.processes:
            if process.replica is not None and process.busy_s > LONG_STEP_S:
                stuck.add(process.replica)
        return stuck

    def _serving(self) -> set[int]:
        return {r.replica for r in self._status.replicas if r.state is ReplicaState.SERVING}

    @property
    def is_supervisor_silent(self) -> bool:
        """True if no recent status came from the supervisor, which restarts all other processes."""
        age_s = self._read()
        return bool(self._status.processes) and age_s > 2 * self._heartbeat_timeout_s

    def _read(self) -> float:
        """Apply a new status. Return the age of the newest status in seconds."""
        if (status := self._subscriber.receive()) is not None:
            self._status = status
            self._on_status(status)
        return self._subscriber.age_s


def _has_begun(action: ReplicaAction, info: ReplicaInfo) -> bool:
    if (role := NEW_ROLES.get(action)) is not None:
        return info.role is role
    if action in (ReplicaAction.SLEEP, ReplicaAction.UNLOAD, ReplicaAction.WAKE):
        return (info.state is ReplicaState.SLEEPING) == (action is not ReplicaAction.WAKE)
    return (info.state is ReplicaState.SERVING) == (action is ReplicaAction.UNDRAIN)


def _why_stalled(process: ProcessInfo, age_s: float) -> str:
    if process.stage is not Stage.READY:
        return f"{process.name}: {process.stage} {process.detail}".rstrip()
    if process.silent_s + age_s > SILENCE_S:
        return f"{process.name}: silent for {process.silent_s + age_s:.1f} s"
    return ""
