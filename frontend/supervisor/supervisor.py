"""The supervisor: the process that starts, watches, restarts, drains and stops every process of an engine.

With a guardian, another supervisor adopts the processes after a crash of this one (`saved_state.py`). Without one, they
exit with the supervisor, because it holds the lifeline (`frontend/supervisor/guardian/`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq

from ...protocol.config import EngineConfig
from ...protocol.config.weights import WeightsFiles
from ...protocol.errors import EngineError
from ...protocol.heartbeat import HeartbeatReader, seconds_to_read
from ...protocol.process import STOP_PROCESS
from ...protocol.supervisor_messages import (
    CauseFound,
    EngineStatus,
    Heartbeat,
    ProcessStatus,
    ReplicaCommand,
    Stage,
    UpdateWeights,
)
from ...protocol.transport import StatusPublisher, StatusReceiver
from . import recovery
from .child import Child
from .guardian.link import GuardianLink
from .handover import HandoverRequested, HandoverSocket
from .hang_watch import HangWatch
from .launcher import Launcher
from .local_process import HAS_EXIT_FD, ProcessSpec, Role
from .nodes import Nodes
from .parse_journal import PoisonBodies, journal_path, read_journal
from .recovery import RecoveryUnit
from .rotation import Rotation
from .saved_state import SavedState, StateFile
from .signals import StopRequested, StopSignals

__all__ = ["ProcessFailed", "ProcessSpec", "Role", "Supervisor"]

WATCH_INTERVAL_S = 0.1
"""Seconds between checks of children on systems that cannot signal the exit of a child."""

FINAL_ERROR_S = 0.3
"""Seconds to wait for the final error of a process that exited, because the report can arrive after the exit."""

FAREWELL_S = 3.0
"""Maximum seconds for frontends to end their streams with an error when the engine cannot continue."""

DRAIN_GRACE_S = 5.0
"""Seconds for cores and for workers to exit, and for frontends beyond the shutdown timeout."""

CAUSE_S = 1.0
"""Seconds for which the exit of a worker that lost a peer is left unhandled, until the exit of that peer is known."""


class ProcessFailed(EngineError):
    """The engine cannot continue because a process failed. The message may be the last line of output."""


class Supervisor:
    """The processes of one engine.

    Call `start`, `wait_until_ready`, `watch` or `poll`, `drain` and `close`, in this order.

    Every method that waits may raise. `StopRequested`: `signals` received a signal. `HandoverRequested`: a successor
    takes the listening socket. `ProcessFailed`: the engine cannot continue, because a process failed before the engine
    was ready, or keeps failing and no other process can serve in its place. After the engine was ready, a process that
    crashes or hangs is restarted, and `on_recovery` receives a line about it. Leaving the `with` block kills all
    remaining processes, unless an unexpected error ends it while a guardian can start another supervisor. The caller
    owns `run_dir`. `was_ready` is true once the engine has been ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[ProcessSpec],
        *,
        on_status: Callable[[ProcessStatus], None] | None = None,
        on_recovery: Callable[[str], None] | None = None,
        signals: StopSignals | None = None,
        guardian: GuardianLink | None = None,
    ) -> None:
        self._launcher = Launcher(guardian)
        self._units = recovery.make_units(specs, config.epoch, self._launcher)
        self._limits = config.recovery
        self.drain_timeout_s = config.frontend.shutdown_timeout_s
        replicas = [unit for unit in self._units if unit.leader.role is Role.CORE]
        if config.parallel.divides_experts_among_replicas:
            recovery.link_units(replicas)
        roles, sleep_idle_s = config.parallel.replica_roles, config.recovery.sleep_idle_s
        weights = WeightsFiles(config.run_dir)
        self._rotation = Rotation(replicas, self.drain_timeout_s, weights, roles, sleep_idle_s)
        self._on_status = on_status
        self._on_recovery = on_recovery
        self._signals = signals
        self._ending: set[Role] = set()
        self.was_ready = False
        self._hang_watch = HangWatch(config.recovery)
        self._is_settled = False
        self._num_dropped_reports = 0
        self._failure = ""
        self._awaits_cause = False
        self._run_dir = Path(config.run_dir)
        self._has_run_dir = True
        self._state_file = StateFile(self._run_dir)
        self._is_retiring = False
        self._poison_bodies = PoisonBodies()
        self._num_dropped_by: Counter[str] = Counter()
        """Name of a process -> the number of frames that it dropped."""
        self._poller = zmq.Poller()
        self._context = zmq.Context()
        try:
            self._open_sockets(config, specs)
        except BaseException:
            # If the constructor raises, the caller has no supervisor to close.
            self._context.destroy()
            self._launcher.close()
            raise
        self._handover: HandoverSocket | None = None
        self._offers_handover = False
        if signals is not None:
            self._poller.register(signals.fd, zmq.POLLIN)
        if guardian is not None:
            self._poller.register(guardian.fd, zmq.POLLIN)

    def _open_sockets(self, config: EngineConfig, specs: Sequence[ProcessSpec]) -> None:
        self._statuses = StatusReceiver(self._context, config)
        local = (spec.name for spec in specs if spec.node is None)
        self._heartbeats = HeartbeatReader(config, local)
        self._publisher = StatusPublisher(self._context, config)
        self._poller.register(self._statuses.socket, zmq.POLLIN)
        if config.parallel.is_distributed:
            self._launcher.nodes = Nodes(self._context, config, self._report)
            self._poller.register(self._launcher.nodes.socket, zmq.POLLIN)

    def start(self) -> None:
        """Start every process at once, except those that an earlier supervisor has started.

        They connect to each other in any order.
        """
        saved = None if self._launcher.link is None else self._state_file.load()
        if saved is not None:
            self._adopt(saved)
        self._launcher.kill_unknown(child.pid for child in self._children())
        if not self._is_retiring:
            for unit in self._units:
                self._watch_exits(unit.start())
        self._save()

    def _adopt(self, saved: SavedState) -> None:
        for unit, saved_unit in zip(self._units, saved.units, strict=True):
            unit.adopt(saved_unit)
        self._rotation.restore(saved.replicas, time.monotonic())
        self._poison_bodies.restore(saved.poison_bodies)
        self._is_retiring = saved.is_retiring
        self.was_ready = saved.was_ready

    def _save(self) -> None:
        """Save what another supervisor needs if this one crashes."""
        if self._launcher.link is not None:
            self._state_file.save(
                SavedState(
                    self.was_ready,
                    self._is_retiring,
                    [unit.save() for unit in self._units],
                    self._rotation.save(),
                    self._poison_bodies.digests(),
                )
            )

    @property
    def pids(self) -> dict[str, int]:
        """The process IDs of the running processes, by name."""
        return {child.spec.name: child.pid for child in self._children() if child.alive}

    @property
    def ready(self) -> bool:
        """True if all frontends are ready; without frontends, if all cores are."""
        facing = [unit for unit in self._units if unit.leader.role is Role.FRONTEND] or self._units
        return all(unit.is_ready for unit in facing)

    def wait_until_ready(self) -> None:
        """Handle events until the engine has been ready once."""
        while not self.was_ready:
            self._wait(None)

    def offer_handover(self, handover: HandoverSocket) -> None:
        """From now on, raise HandoverRequested from waits when a successor takes over the listening socket."""
        self._handover, self._offers_handover = handover, True
        self._poller.register(handover.fd, zmq.POLLIN)

    def _end_handovers(self) -> None:
        if self._offers_handover and self._handover is not None:
            self._offers_handover = False
            self._poller.unregister(self._handover.fd)
            self._handover.stop_listening()

    def watch(self) -> None:
        """Handle events until StopRequested, HandoverRequested or ProcessFailed is raised. This never returns."""
        if self._is_retiring:
            raise HandoverRequested
        while True:
            self._wait(None)

    def poll(self) -> None:
        """Handle events since the last call, without waiting."""
        self._wait(0.0)

    def retire(self) -> None:
        """Stop accepting connections, and wait without a time limit until the open ones have ended.

        Meanwhile requests on them are served, and cores and workers are restarted when they crash.
        """
        self._end_handovers()
        self._ending.add(Role.FRONTEND)
        self._is_retiring = True
        self._save()
        self._wait_for_exit(self._end(Role.FRONTEND, signal.SIGUSR1), math.inf)

    def drain(self, on_frontends_ended: Callable[[], None] = lambda: None) -> None:
        """Let the frontends finish their streams, then stop the store, cores and workers."""
        self._end_handovers()
        self._ending.add(Role.FRONTEND)
        frontends = self._end(Role.FRONTEND)
        self._wait_for_exit(frontends, self.drain_timeout_s + DRAIN_GRACE_S)
        on_frontends_ended()
        self._ending.update(Role)
        self._end(Role.STORE)
        self._wait_for_exit(self._end(Role.CORE), DRAIN_GRACE_S)
        # The final messages of a core may not have reached other machines yet.
        self._wait_for_exit(list(self._children()), FINAL_ERROR_S)
        self._wait_for_exit(self._end(Role.WORKER), DRAIN_GRACE_S)

    def close(self, reason: str = "") -> None:
        """Kill all remaining processes. If `reason` names a failure, it is sent to clients and other machines."""
        if reason and self.was_ready:
            self._fail_streams(reason)
        self._launcher.end_beats()
        for child in self._children():
            child.kill()
        for child in self._children():
            child.close()
        for unit in self._units:
            unit.children.clear()
        if self._launcher.nodes is not None:
            self._launcher.nodes.close(reason)
        self._statuses.close()
        self._heartbeats.close()
        self._publisher.close()
        self._context.term()
        self._launcher.close()
        if self._handover is not None:
            self._handover.close()

    def _fail_streams(self, reason: str) -> None:
        """Let the frontends end every response with an error that contains `reason`."""
        self._ending.update(Role)
        self._failure = reason
        self._publisher.publish(self._make_status())
        with contextlib.suppress(StopRequested):
            self._wait_for_exit(self._end(Role.FRONTEND), FAREWELL_S)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_known = error is None or isinstance(error, EngineError | StopRequested)
        if self._launcher.link is not None and self.was_ready and not is_known:
            return
        self.close(str(error) if isinstance(error, EngineError) else "")

    def _children(self) -> Iterable[Child]:
        return [child for unit in self._units for child in unit.children.values()]

    def _end(self, role: Role, signum: signal.Signals = STOP_PROCESS) -> list[Child]:
        children = [child for child in self._children() if child.spec.role is role]
        for child in children:
            child.signal(signum)
        return children

    def _wait_for_exit(self, children: list[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(child.alive for child in children):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._wait(remaining)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an event, the next heartbeats or `timeout_s` seconds, then handle what happened."""
        recovering = [unit for unit in self._units if unit.leader.role not in self._ending]
        actions = (unit.next_action for unit in recovering)
        wake_at = min(filter(None, actions), default=math.inf)
        has_events = HAS_EXIT_FD and not self._awaits_cause
        interval_s = seconds_to_read() if has_events else WATCH_INTERVAL_S
        interval_s = min(interval_s, max(wake_at - time.monotonic(), 0.0))
        timeout_s = interval_s if timeout_s is None else min(timeout_s, interval_s)
        if not self._poller.poll(math.ceil(timeout_s * 1000)) and self._is_settled:
            self._look()
            return
        self._launcher.read_exits()
        if self._signals is not None:
            self._signals.raise_if_received(self._launcher.take_forwarded_signals())
        if self._offers_handover and self._handover is not None:
            self._handover.raise_if_requested()
        self._read_reports()
        self._hang_watch.kill_hung(self._children(), time.monotonic())
        if self._rotation.advance(time.monotonic(), may_sleep=self.was_ready):
            self._report("no request came: the model is unloaded until the next one")
        exits = [
            (unit, child)
            for unit in self._units
            for child in unit.children.values()
            if not child.alive and not child.is_known_dead
        ]
        # Handle the process that caused the others to exit first.
        exits.sort(key=lambda exit: exit[1].may_have_lost_peer)
        self._awaits_cause = False
        for unit, child in exits:
            if self._may_find_cause(unit, child):
                self._awaits_cause = True
            else:
                self._on_exit(unit, child)
        for unit in self._units:
            if unit in recovering:
                self._watch_exits(unit.recover(time.monotonic()))
        self.was_ready |= self.ready
        self._save()
        self._publisher.publish(self._make_status())
        self._is_settled = (
            HAS_EXIT_FD
            and self._launcher.nodes is None
            and not self._ending
            and not self._poison_bodies.digests()
            and self._rotation.is_settled
            and all(unit.is_settled for unit in self._units)
        )

    def _look(self) -> None:
        """Read heartbeats, and find processes that hang or are idle, while nothing else happens."""
        self._read_heartbeats()
        self._hang_watch.kill_hung(self._children(), time.monotonic())
        if self._rotation.find_idle(time.monotonic()):
            self._is_settled = False
        self._publisher.refresh(self._make_status())

    def _watch_exits(self, children: Iterable[Child]) -> None:
        for child in children:
            if child.exit_fd is not None:
                self._poller.register(child.exit_fd, zmq.POLLIN)

    def _read_heartbeats(self) -> None:
        self._launcher.beat()
        children = {(child.spec.name, child.pid): child for child in self._children()}
        for heartbeat, at in self._heartbeats.read():
            # A record may still have the last heartbeat of a predecessor.
            if child := children.get((heartbeat.process, heartbeat.pid)):
                self._apply_heartbeat(child, heartbeat, at)

    def _read_reports(self) -> None:
        self._read_heartbeats()
        if self._launcher.nodes is not None:
            for remote_report in self._launcher.nodes.read_reports():
                self._apply_report(remote_report)
        while (report := self._statuses.receive(0)) is not None:
            if isinstance(report, CauseFound):
                for unit in self._units:
                    if unit.leader.role is Role.CORE:
                        unit.record_cause_found(self._limits.max_restarts)
            elif isinstance(report, ReplicaCommand | UpdateWeights):
                if not self.was_ready:
                    continue
                if self._rotation.apply_command(report, time.monotonic()):
                    self._report(str(report))
                self._publisher.publish(self._make_status())
            else:
                self._apply_report(report)

    def _apply_heartbeat(self, child: Child, heartbeat: Heartbeat, at: float) -> None:
        num_dropped = heartbeat.num_dropped_frames - child.progress.num_dropped_frames
        self._num_dropped_by[heartbeat.process] += num_dropped
        child.beat(heartbeat, at)

    def _apply_report(self, report: ProcessStatus | Heartbeat) -> None:
        child = next((c for c in self._children() if c.spec.name == report.process), None)
        if child is None or report.pid != child.pid:
            self._num_dropped_reports += 1
            return
        if isinstance(report, Heartbeat):
            self._apply_heartbeat(child, report, time.monotonic())
            return
        child.enter_stage(report.stage, report.detail)
        if self._on_status is not None and not self.was_ready:
            self._on_status(report)
        if report.stage is Stage.FAILED and not self.was_ready and not self._ending:
            raise ProcessFailed(child.exit_summary())

    def _may_find_cause(self, unit: RecoveryUnit, child: Child) -> bool:
        """Return whether to wait for the exit of the process that may have caused this one's exit.

        A worker may exit before the failed one: its connections to the failed worker close while that one still reports
        its error.
        """
        if (
            unit.is_down
            or child.spec.role in self._ending
            or not child.may_have_lost_peer
            or not unit.has_connected(child)
            or unit.find_cause(child) is not None
        ):
            return False
        # The file descriptor of an exited process stays readable, so it would end every wait immediately.
        self._close_exit_fd(child)
        child.awaits_cause_until = child.awaits_cause_until or time.monotonic() + CAUSE_S
        return time.monotonic() < child.awaits_cause_until

    def _on_exit(self, unit: RecoveryUnit, child: Child) -> None:
        child.is_known_dead = True
        self._close_exit_fd(child)
        if child.spec.role in self._ending or unit.has_slept:
            return
        deadline = time.monotonic() + (0.0 if child.was_killed else FINAL_ERROR_S)
        while child.stage is not Stage.FAILED and time.monotonic() < deadline:
            self._statuses.socket.poll(int(WATCH_INTERVAL_S * 1000))
            self._read_reports()
        self._check_run_dir()
        if not self._has_run_dir:
            raise ProcessFailed(
                f"{child.exit_summary()}; no process can be restarted, because the run directory {self._run_dir} was "
                "deleted; exclude it from programs that clean temporary files"
            )
        if not self.was_ready:
            raise ProcessFailed(child.exit_summary())
        if child.spec.role is Role.FRONTEND:
            self._poison_bodies.record_crash(
                read_journal(journal_path(self._run_dir, child.spec.name)),
                has_crashed=child.has_crashed,
            )
        is_first = not unit.is_down
        unit.record_exit(child, self._limits.max_restarts)
        max_restarts = self._limits.max_restarts
        reason = recovery.why_nothing_serves(unit, self._units, max_restarts)
        has_failed = reason or (is_first and child.stage is Stage.FAILED)
        if has_failed and self._rotation.revert_weights(child, time.monotonic()):
            self._report(f"{child.exit_summary()}; the previous weights are loaded again")
            return
        if reason:
            raise ProcessFailed(f"{child.exit_summary()}. {reason}")
        if is_first and (line := recovery.describe_crash(unit, max_restarts)):
            self._report(f"{child.exit_summary()}; {line}")
        self._publisher.publish(self._make_status())

    def _close_exit_fd(self, child: Child) -> None:
        if child.exit_fd is not None:
            self._poller.unregister(child.exit_fd)
            os.close(child.exit_fd)
            child.exit_fd = None

    def _check_run_dir(self) -> None:
        """Warn once if the run directory was deleted: running processes go on, but new ones cannot connect to them."""
        if self._has_run_dir and not os.path.exists(self._run_dir):
            self._has_run_dir = False
            self._report(
                f"the run directory {self._run_dir} was deleted: running processes continue, but the server stops as soon as "
                "one of them exits; restart the server when you can"
            )

    def _make_status(self) -> EngineStatus:
        self._check_run_dir()
        now = time.monotonic()
        processes = [
            child.process_info(now, unit.num_restarts[name], self._num_dropped_by[name])
            for unit in reversed(self._units)
            for name, child in unit.children.items()
        ]
        replicas = self._rotation.replica_infos() if self.was_ready else []
        digests = self._poison_bodies.digests()
        num_dropped = self._statuses.num_dropped_frames + self._num_dropped_reports
        num_dropped += self._heartbeats.num_dropped_frames + self._launcher.num_dropped_frames
        return EngineStatus(processes, replicas, num_dropped, self._failure, digests)

    def _report(self, text: str) -> None:
        if self._on_recovery is not None:
            self._on_recovery(text)
