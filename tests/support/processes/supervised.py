"""Supervisors of stand-ins, and the operations that tests perform on them."""

from collections.abc import Callable
from pathlib import Path

import zmq
from engine.frontend.supervisor.supervisor import Supervisor
from engine.protocol.config import RecoveryConfig
from engine.protocol.supervisor_messages import EngineStatus, ReplicaAction, ReplicaCommand, Stage
from engine.protocol.transport import StatusReporter, StatusSubscriber
from msgspec.structs import replace
from support.processes.stand_ins import make_config, make_specs
from support.processes.waiting import eventually

ALL_READY = {"worker 0": "ready", "core 0": "ready", "frontend 0": "ready"}


def events(run_dir: str) -> list[str]:
    path = Path(f"{run_dir}.events")
    return path.read_text().splitlines() if path.exists() else []


def supervisor_of(run_dir: str, behaviors: dict[str, str], **options: object) -> Supervisor:
    config = make_config(run_dir, shutdown_timeout_s=float(options.pop("shutdown_timeout_s", 5.0)))  # type: ignore[arg-type]
    config = replace(config, recovery=options.pop("recovery", RecoveryConfig()))
    return Supervisor(config, make_specs(config, behaviors), **options)  # type: ignore[arg-type]


def lives(run_dir: str, name: str) -> int:
    return events(run_dir).count(f"{name} started")


TWO_REPLICAS = ALL_READY | {"worker 1": "ready", "core 1": "ready"}

TWO_OF_ALL = TWO_REPLICAS | {"frontend 1": "ready"}


class Operator:
    """Sends commands and receives the published states, as a frontend does."""

    def __init__(self, supervisor: Supervisor, run_dir: str) -> None:
        self._supervisor = supervisor
        self._context = zmq.Context()
        self._config = config = make_config(run_dir)
        self._reporter = StatusReporter(self._context, config, "operator")
        self._subscriber = StatusSubscriber(self._context, config)
        self._status = EngineStatus([])
        self.has_resumed = False
        """True if the streams of a replica were published to wait for it."""

    def command(self, replica: int, action: ReplicaAction) -> None:
        self._reporter.send_command(ReplicaCommand(replica, action))

    def sees(self, *states: str) -> bool:
        return self._sees(lambda status: [r.state for r in status.replicas] == list(states))

    def sees_ready(self, names: set[str]) -> bool:
        """The processes, as they are now, and all replicas."""
        return self._sees(
            lambda status: (
                {p.name for p in status.processes if p.stage is Stage.READY} >= names
                and all(replica.is_up for replica in status.replicas)
                and {p.name: p.pid for p in status.processes} == self._supervisor.pids
            )
        )

    def send(self, *frames: bytes) -> None:
        """Send a report as a process does."""
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(self._config.supervisor_address())
            for frame in frames:
                socket.send(frame)

    def sees_dropped(self, count: int) -> bool:
        return self._sees(lambda status: status.num_dropped_frames == count)

    def sees_stage(self, name: str, stage: Stage) -> bool:
        return self._sees(
            lambda status: any((p.name, p.stage) == (name, stage) for p in status.processes)
        )

    def sees_dropped_by_worker(self, count: int) -> bool:
        return self._sees(
            lambda status: any(
                (p.name, p.num_dropped_frames) == ("worker 0", count) for p in status.processes
            )
        )

    def sees_not_ready(self, name: str) -> bool:
        return self._sees(
            lambda status: (
                any(p.name == name and p.stage is not Stage.READY for p in status.processes)
                and not all(replica.is_up for replica in status.replicas)
            )
        )

    def sees_silence(self, timeout_s: float = 30.0) -> bool:
        """The states of three looks in a row, without a message that there is another."""
        num_silent = 0

        def has_looked() -> bool:
            nonlocal num_silent
            self._supervisor.poll()
            has_message = self._subscriber.socket.poll(20)
            has_state = self._subscriber.receive() is not None
            num_silent = num_silent + 1 if has_state and not has_message else 0
            return num_silent == 3

        return eventually(has_looked, timeout_s)

    def _sees(self, condition: Callable[[EngineStatus], bool]) -> bool:
        return eventually(lambda: self.look() or condition(self._status))

    def look(self) -> None:
        """Let the supervisor run, and receive the states that it publishes."""
        self._supervisor.poll()
        if (status := self._subscriber.receive()) is not None:
            self._status = status
            self.has_resumed |= any(replica.is_resuming for replica in status.replicas)

    def close(self) -> None:
        self._reporter.close()
        self._subscriber.close()
        self._context.term()
