"""The parent of every process of an engine: starts, watches, restarts, drains and ends them.

It holds a pipe to each child's standard input. Whatever happens to the supervisor, the pipe closes and
the child goes; so nothing outlives it, not even after SIGKILL.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import zmq

from ..protocol.config import EngineConfig
from ..protocol.errors import EngineError
from ..protocol.supervisor_messages import (
    CauseFound,
    EngineStatus,
    Heartbeat,
    ProcessReport,
    ProcessStatus,
    ReplicaCommand,
    Stage,
)
from ..protocol.transport import StatusPublisher, StatusReceiver
from . import recovery
from .child import Child
from .local_process import HAS_EXIT_FD, LocalProcess, Process, ProcessSpec, Role
from .nodes import Nodes
from .recovery import RecoveryUnit
from .rotation import Rotation
from .stop_signals import StopSignals

__all__ = ["ProcessFailed", "ProcessSpec", "Role", "Supervisor", "engine_processes"]

WATCH_INTERVAL_S = 0.1
"""How often children are looked at where the system cannot announce their end."""

STATUS_INTERVAL_S = 0.5
"""How often the state of every process is looked at and told."""

LAST_WORDS_S = 0.3
"""A process that ends by itself may have reported why; the report can arrive after its end is seen."""

TELL_EVERY = 50
"""A process that keeps dying while others serve in its place is announced again after so many more deaths."""

DRAIN_GRACE_S = 5.0
"""What a frontend may take beyond the shutdown timeout, and cores and workers each."""


class ProcessFailed(EngineError):
    """A process reported a failure or died; the message is fit to be the last line."""


def engine_processes(
    config: EngineConfig, config_path: Path, listen_fd: int | None
) -> list[ProcessSpec]:
    """The processes of `config`, slowest to start first; without a `listen_fd` there are no frontends."""

    def spec(name: str, role: Role, module: str, index: int, *args: int) -> ProcessSpec:
        # -P: a file in the current directory must not shadow a module.
        command = (sys.executable, "-P", "-m", f"engine.{module}", str(config_path))
        argv = command + tuple(map(str, (index, *args)))
        return ProcessSpec(name, role, argv, replica=index)

    def worker(core: int, rank: int) -> ProcessSpec:
        number = core * parallel.workers_per_core + rank
        here = spec(f"worker {number}", Role.WORKER, "workers", core, rank)
        if parallel.is_external or parallel.node_of(number) > 0:
            return replace(here, node=parallel.node_of(number))
        if parallel.spans_nodes(core):
            return replace(here, env=rendezvous_environment(config, core, parallel.master_addr))
        return here

    parallel = config.parallel
    cores = range(parallel.data_parallel_size)
    specs = [worker(core, rank) for core in cores for rank in range(parallel.workers_per_core)]
    specs += [
        replace(spec(f"core {core}", Role.CORE, "core", core), can_wait=True) for core in cores
    ]
    if listen_fd is not None:
        for client in range(parallel.api_server_count):
            frontend = spec(f"frontend {client}", Role.FRONTEND, "frontend", client, listen_fd)
            specs.append(ProcessSpec(frontend.name, frontend.role, frontend.argv, (listen_fd,)))
    return specs


def rendezvous_environment(config: EngineConfig, core_index: int, host: str) -> dict[str, str]:
    """Where the workers of a replica on several machines meet, in the names of torch.distributed."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(config.rendezvous_port(core_index))}


class Supervisor:
    """The life of one engine: `start`, `wait_until_ready`, `watch` or `poll`, `drain`, `close`.

    Every wait ends early with `StopRequested` when `signals` receives one, and with `ProcessFailed` when the engine
    cannot go on: a process fails before the engine was ready, or again and again with no other to serve in its place.
    Once the engine was ready a process that dies or hangs is started anew, and `on_recovery` gets a line about it.
    Leaving the `with` block kills what still runs. `run_dir` is the caller's.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[ProcessSpec],
        *,
        on_status: Callable[[ProcessStatus], None] | None = None,
        on_recovery: Callable[[str], None] | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self._units = _make_units(specs, config.epoch, self._launch)
        self._limits = config.recovery
        self.drain_timeout_s = config.frontend.shutdown_timeout_s
        replicas = [unit for unit in self._units if unit.leader.role is Role.CORE]
        self._rotation = Rotation(replicas, self.drain_timeout_s)
        self._on_status = on_status
        self._on_recovery = on_recovery
        self._signals = signals
        self._ending: set[Role] = set()
        self._ready_since: float | None = None
        self._last_look = time.monotonic()
        self._last_published = 0.0
        self._num_dropped_reports = 0
        self._num_dropped_by: Counter[str] = Counter()
        """Frames, by the name of a process."""
        self._poller = zmq.Poller()
        self._nodes: Nodes | None = None
        self._context = zmq.Context()
        try:
            self._open_sockets(config)
        except BaseException:
            # The caller has no supervisor to close.
            self._context.destroy()
            raise
        if signals is not None:
            self._poller.register(signals.fd, zmq.POLLIN)

    def _open_sockets(self, config: EngineConfig) -> None:
        self._statuses = StatusReceiver(self._context, config)
        self._publisher = StatusPublisher(self._context, config)
        self._poller.register(self._statuses.socket, zmq.POLLIN)
        if config.parallel.is_distributed:
            self._nodes = Nodes(self._context, config, self._tell)
            self._poller.register(self._nodes.socket, zmq.POLLIN)

    def _launch(self, spec: ProcessSpec, epoch: int) -> Process:
        if spec.node is None or self._nodes is None:
            return LocalProcess(spec, epoch)
        return self._nodes.launch(spec, epoch)

    def start(self) -> None:
        """Start every process at once; they find each other."""
        for unit in self._units:
            self._watch_exits(unit.start())

    @property
    def pids(self) -> dict[str, int]:
        """The process id of every process that runs, by name."""
        return {child.spec.name: child.pid for child in self._children() if child.alive}

    @property
    def ready(self) -> bool:
        """Whether the processes that face the clients are ready: the frontends, or the cores without them."""
        facing = [unit for unit in self._units if unit.leader.role is Role.FRONTEND] or self._units
        return all(unit.is_ready for unit in facing)

    @property
    def was_ready(self) -> bool:
        return self._ready_since is not None

    def wait_until_ready(self) -> None:
        while not self.ready:
            self._wait(None)

    def watch(self) -> None:
        """Wait for a stop signal or for an engine that cannot go on: this never returns."""
        while True:
            self._wait(None)

    def poll(self) -> None:
        """Handle what has happened since the last call, without waiting."""
        self._wait(0.0)

    def drain(self, on_frontends_ended: Callable[[], None] = lambda: None) -> None:
        """Let the frontends finish their streams, then end cores and workers."""
        self._ending.add(Role.FRONTEND)
        for unit in self._units:
            unit.dismiss_spare()
        frontends = self._end(Role.FRONTEND)
        self._wait_for_exit(frontends, self.drain_timeout_s + DRAIN_GRACE_S)
        on_frontends_ended()
        self._ending.update(Role)
        self._wait_for_exit(self._end(Role.CORE), DRAIN_GRACE_S)
        # The last words of a core may not have reached another machine.
        self._wait_for_exit(list(self._children()), LAST_WORDS_S)
        self._wait_for_exit(self._end(Role.WORKER), DRAIN_GRACE_S)

    def close(self, reason: str = "") -> None:
        """Kill what still runs. Other machines are told the `reason` if it is a failure."""
        for child in self._children():
            child.kill()
        for child in self._children():
            child.close()
        for unit in self._units:
            unit.children.clear()
            unit.dismiss_spare()
        if self._nodes is not None:
            self._nodes.close(reason)
        self._statuses.close()
        self._publisher.close()
        self._context.term()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(str(error) if isinstance(error, EngineError) else "")

    def _children(self) -> Iterable[Child]:
        return [child for unit in self._units for child in unit.children.values()]

    def _end(self, role: Role) -> list[Child]:
        children = [child for child in self._children() if child.spec.role is role]
        for child in children:
            child.signal(signal.SIGTERM)
        return children

    def _wait_for_exit(self, children: list[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(child.alive for child in children):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._wait(remaining)

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until something happens, it is time to look, or `timeout_s` passes, and handle it."""
        recovering = [unit for unit in self._units if unit.leader.role not in self._ending]
        actions = [unit.next_action for unit in recovering]
        wake_at = min((at for at in actions if at is not None), default=math.inf)
        interval_s = STATUS_INTERVAL_S if HAS_EXIT_FD else WATCH_INTERVAL_S
        interval_s = min(interval_s, max(wake_at - time.monotonic(), 0.0))
        timeout_s = interval_s if timeout_s is None else min(timeout_s, interval_s)
        self._poller.poll(math.ceil(timeout_s * 1000))
        if self._signals is not None:
            self._signals.raise_if_received()
        self._read_reports()
        self._kill_what_hangs()
        self._rotation.advance(time.monotonic())
        for unit in self._units:
            for child in list(unit.children.values()):
                if not child.alive and not child.is_known_dead:
                    self._on_exit(unit, child)
            if unit in recovering:
                self._watch_exits(unit.recover(time.monotonic()))
            if self._ready_since is not None and not self._ending:
                unit.keep_spare(time.monotonic(), self._ready_since)
        if self._ready_since is None and self.ready:
            self._ready_since = time.monotonic()
        if time.monotonic() - self._last_published > STATUS_INTERVAL_S / 2:
            self._publish()

    def _watch_exits(self, children: Iterable[Child]) -> None:
        for child in children:
            if child.exit_fd is not None:
                self._poller.register(child.exit_fd, zmq.POLLIN)

    def _read_reports(self) -> None:
        if self._nodes is not None:
            for remote_report in self._nodes.read_reports():
                self._take_report(remote_report)
        while (report := self._statuses.receive(0)) is not None:
            if isinstance(report, CauseFound):
                for unit in self._units:
                    if unit.leader.role is Role.CORE:
                        unit.cause_found(self._limits.max_restarts)
            elif isinstance(report, ReplicaCommand):
                if not self.was_ready:
                    continue
                self._tell(f"replica {report.replica}: {report.action}")
                self._rotation.obey(report, time.monotonic())
                self._publish()
            else:
                self._take_report(report)

    def _take_report(self, report: ProcessReport) -> None:
        child = next((c for c in self._children() if c.spec.name == report.process), None)
        if child is None or report.pid != child.pid:
            self._num_dropped_reports += 1
            return
        if isinstance(report, Heartbeat):
            num_dropped_before = child.progress.num_dropped_frames
            self._num_dropped_by[report.process] += report.num_dropped_frames - num_dropped_before
            child.beat(report)
            return
        child.enter(report.stage, report.detail)
        self._last_published = 0.0
        if self._on_status is not None and not self.was_ready:
            self._on_status(report)
        if report.stage is Stage.FAILED and not self.was_ready and not self._ending:
            raise ProcessFailed(child.obituary())

    def _on_exit(self, unit: RecoveryUnit, child: Child) -> None:
        child.is_known_dead = True
        self._forget_exit(child)
        if child.spec.role in self._ending:
            return
        deadline = time.monotonic() + (0.0 if child.was_killed else LAST_WORDS_S)
        while child.stage is not Stage.FAILED and time.monotonic() < deadline:
            self._statuses.socket.poll(int(WATCH_INTERVAL_S * 1000))
            self._read_reports()
        if not self.was_ready:
            raise ProcessFailed(child.obituary())
        is_first = not unit.is_down
        unit.died(child, self._limits.max_restarts)
        if unit.is_lost:
            self._give_up_if_alone(unit, child)
        if is_first:
            self._tell_of_death(unit, child)
        self._publish()

    def _give_up_if_alone(self, unit: RecoveryUnit, child: Child) -> None:
        """Raise ProcessFailed if no other can serve in the place of a unit that is lost."""
        others = [
            other
            for other in self._units
            if other is not unit and other.leader.role is unit.leader.role
        ]
        if all(other.is_lost for other in others):
            lives = " and ".join(
                f"{lost.leader.name} produced nothing in {lost.num_fruitless_deaths} lives"
                for lost in (unit, *others)
            )
            raise ProcessFailed(
                f"{child.obituary()}, and {lives}: giving up (--max-restarts {self._limits.max_restarts})"
            )

    def _tell_of_death(self, unit: RecoveryUnit, child: Child) -> None:
        num_more = unit.num_fruitless_deaths - self._limits.max_restarts - 1
        if num_more < 0:
            self._tell(f"{child.obituary()}; starting it again")
        elif num_more % TELL_EVERY == 0:
            self._tell(
                f"{child.obituary()}; {unit.leader.name} produced nothing in {unit.num_fruitless_deaths} lives: "
                f"others serve, and it is tried again every {recovery.MAX_BACKOFF_S:.0f} s"
            )

    def _forget_exit(self, child: Child) -> None:
        if child.exit_fd is not None:
            self._poller.unregister(child.exit_fd)
            os.close(child.exit_fd)
            child.exit_fd = None

    def _kill_what_hangs(self) -> None:
        now = time.monotonic()
        # While this process was stopped it received no heartbeats, which is no fault of its children.
        lost_s = max(0.0, now - self._last_look - 2 * STATUS_INTERVAL_S)
        self._last_look = now
        limits = self._limits
        for child in self._children():
            if not child.alive:
                continue
            child.last_beat += lost_s
            child.hang = child.hang or child.find_hang(
                now, limits.heartbeat_timeout_s, limits.step_timeout_s
            )
            if child.hang or (child.kill_at is not None and now > child.kill_at):
                child.kill()

    def _publish(self) -> None:
        self._last_published = now = time.monotonic()
        processes = [
            child.info(now, unit.num_restarts[name], self._num_dropped_by[name])
            for unit in reversed(self._units)
            for name, child in unit.children.items()
        ]
        replicas = self._rotation.infos() if self.was_ready else []
        self._publisher.publish(EngineStatus(processes, replicas, self._num_dropped_frames))

    @property
    def _num_dropped_frames(self) -> int:
        of_nodes = 0 if self._nodes is None else self._nodes.num_dropped_frames
        return self._statuses.num_dropped_frames + self._num_dropped_reports + of_nodes

    def _tell(self, text: str) -> None:
        if self._on_recovery is not None:
            self._on_recovery(text)


def _make_units(
    specs: Sequence[ProcessSpec], epoch: int, launch: Callable[[ProcessSpec, int], Process]
) -> list[RecoveryUnit]:
    """Replicas and frontends, in the order of `specs`."""
    units = []
    for spec in specs:
        workers: list[ProcessSpec] = []
        if spec.role is Role.WORKER:
            continue
        if spec.role is Role.CORE:
            workers = [s for s in specs if s.role is Role.WORKER and s.replica == spec.replica]
        units.append(RecoveryUnit(spec, workers, epoch, launch))
    return units
