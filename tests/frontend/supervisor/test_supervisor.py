"""Life cycle of an engine's processes, with small real processes in place of the large ones."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine.frontend.supervisor import recovery
from engine.frontend.supervisor import supervisor as supervisor_module
from engine.frontend.supervisor.child import Child
from engine.frontend.supervisor.local_process import LocalProcess, ProcessSpec, Role
from engine.frontend.supervisor.recovery import RecoveryUnit
from engine.frontend.supervisor.supervisor import ProcessFailed, Supervisor, engine_processes
from engine.protocol.config import ParallelConfig, RecoveryConfig
from engine.protocol.supervisor_messages import (
    EngineStatus,
    Heartbeat,
    ProcessStatus,
    ReplicaAction,
    ReplicaCommand,
    Stage,
)
from engine.protocol.transport import StatusReporter, StatusSubscriber, encode
from msgspec.structs import replace
from support.open_contexts import open_contexts
from support.processes import eventually, is_running
from support.stand_ins import make_config, make_specs

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"
ALL_READY = {"worker 0": "ready", "core 0": "ready", "frontend 0": "ready"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    yield str(path)


def events(run_dir: str) -> list[str]:
    path = Path(f"{run_dir}.events")
    return path.read_text().splitlines() if path.exists() else []


def supervisor_of(run_dir: str, behaviors: dict[str, str], **options: object) -> Supervisor:
    config = make_config(run_dir, shutdown_timeout_s=float(options.pop("shutdown_timeout_s", 5.0)))  # type: ignore[arg-type]
    config = replace(config, recovery=options.pop("recovery", RecoveryConfig()))
    return Supervisor(config, make_specs(config, behaviors), **options)  # type: ignore[arg-type]


def test_failed_construction_closes_everything(run_dir: str) -> None:
    before = open_contexts()
    # Nothing can be bound where a directory is.
    Path(make_config(run_dir).status_address().removeprefix("ipc://")).mkdir()
    with pytest.raises(zmq.ZMQError):
        supervisor_of(run_dir, ALL_READY)
    assert open_contexts() <= before


def test_drain_stops_frontends_then_cores_then_workers(run_dir: str) -> None:
    with supervisor_of(run_dir, ALL_READY) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        pids = supervisor.pids
        assert set(pids) == set(ALL_READY)
        supervisor.drain()
        assert supervisor.pids == {}
    stopped = [e for e in events(run_dir) if e.endswith("stopped")]
    assert stopped == ["frontend 0 stopped", "core 0 stopped", "worker 0 stopped"]
    assert not any(map(is_running, pids.values()))


def test_engine_without_frontends_is_ready_with_its_cores(run_dir: str) -> None:
    behaviors = {"worker 0": "starting", "core 0": "ready"}
    with supervisor_of(run_dir, behaviors) as supervisor:
        supervisor.start()
        assert not supervisor.ready
        supervisor.wait_until_ready()
        supervisor.poll()


def test_progress_of_children_is_forwarded_in_order(run_dir: str) -> None:
    seen: list[ProcessStatus] = []

    def worker_is_ready() -> bool:
        return any(s.process == "worker 0" and s.stage is Stage.READY for s in seen)

    # No progress is forwarded once the engine is ready, and the stand-ins for cores do not wait for workers.
    behaviors = {"worker 0": "load", "core 0": "starting"}
    with supervisor_of(run_dir, behaviors, on_status=seen.append) as supervisor:
        supervisor.start()
        assert eventually(lambda: supervisor.poll() or worker_is_ready())
    worker = [(s.stage, s.done) for s in seen if s.process == "worker 0"]
    assert worker == [
        (Stage.STARTING, 0),
        (Stage.LOADING, 0),
        (Stage.LOADING, 40),
        (Stage.LOADING, 100),
        (Stage.READY, 0),
    ]


@pytest.mark.parametrize(
    ("behavior", "message"),
    [
        ("fail:the file is damaged; download it again", "worker 0: the file is damaged; download"),
        ("exit:7", r"worker 0 exited unexpectedly with code 7"),
        ("exit:0", r"worker 0 exited unexpectedly with code 0"),
        ("die:SIGSEGV", "worker 0 was killed by SIGSEGV"),
        ("die:SIGKILL", "worker 0 was killed by SIGKILL, .* out-of-memory killer"),
    ],
)
def test_startup_failure_stops_the_engine_with_the_reason(
    run_dir: str, behavior: str, message: str
) -> None:
    behaviors = ALL_READY | {"worker 0": behavior, "frontend 0": "starting"}
    with (
        pytest.raises(ProcessFailed, match=message),
        supervisor_of(run_dir, behaviors) as supervisor,
    ):
        supervisor.start()
        pids = supervisor.pids
        supervisor.wait_until_ready()
    assert not any(map(is_running, pids.values()))


def test_program_that_cannot_be_started_stops_the_engine(run_dir: str) -> None:
    config = make_config(run_dir)
    spec = ProcessSpec("core 0", Role.CORE, ("/no/such/program",))
    message = "core 0: cannot start /no/such/program: No such file or directory"
    with pytest.raises(ProcessFailed, match=message), Supervisor(config, [spec]) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()


@pytest.mark.parametrize("name", ["frontend 0", "core 0", "worker 0"])
def test_failed_restart_is_retried(run_dir: str, tmp_path: Path, name: str) -> None:
    """This happens while a package is being upgraded, or when the process limit is reached."""
    config = make_config(run_dir)
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    specs = [
        dataclasses.replace(spec, argv=(str(program), *spec.argv[1:]), can_wait=False)
        for spec in make_specs(config, ALL_READY)
    ]
    messages: list[str] = []
    with Supervisor(config, specs, on_recovery=messages.append) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        away = program.rename(tmp_path / "away")
        os.kill(supervisor.pids[name], signal.SIGKILL)
        refusal = f"{name}: cannot start {program}: No such file or directory; restarting it"
        assert eventually(lambda: supervisor.poll() or refusal in messages), messages
        away.rename(program)
        assert eventually(
            lambda: (
                supervisor.poll() or (supervisor.ready and set(supervisor.pids) == set(ALL_READY))
            )
        )


def lives(run_dir: str, name: str) -> int:
    return events(run_dir).count(f"{name} started")


def is_resuming(supervisor: Supervisor) -> bool:
    """Return whether the streams of the replica wait for it."""
    return supervisor._rotation.replica_infos()[0].is_resuming


def test_crashed_core_is_replaced_and_its_worker_kept(run_dir: str) -> None:
    messages: list[str] = []
    with supervisor_of(run_dir, ALL_READY, on_recovery=messages.append) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        before = supervisor.pids
        os.kill(before["core 0"], signal.SIGSEGV)
        assert eventually(lambda: supervisor.poll() or is_resuming(supervisor))
        assert eventually(lambda: supervisor.poll() or lives(run_dir, "core 0") == 2)
        after = supervisor.pids
        assert after["core 0"] != before["core 0"]
        assert after | {"core 0": 0} == before | {"core 0": 0}
    assert messages == ["core 0 was killed by SIGSEGV; see its messages above; restarting it"]


def test_second_core_crash_without_a_token_restarts_its_worker(run_dir: str) -> None:
    with supervisor_of(run_dir, ALL_READY) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        for life in (2, 3):
            assert lives(run_dir, "worker 0") == 1
            os.kill(supervisor.pids["core 0"], signal.SIGSEGV)
            assert eventually(
                lambda life=life: supervisor.poll() or lives(run_dir, "core 0") == life
            )
        assert eventually(lambda: supervisor.poll() or lives(run_dir, "worker 0") == 2)


def test_worker_crash_restarts_only_its_replica(run_dir: str) -> None:
    with supervisor_of(run_dir, ALL_READY) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        before = supervisor.pids
        os.kill(before["worker 0"], signal.SIGSEGV)
        assert eventually(
            lambda: (
                supervisor.poll() or supervisor.pids.get("core 0") not in (None, before["core 0"])
            )
        )
        assert not is_resuming(supervisor)
        assert eventually(lambda: supervisor.poll() or lives(run_dir, "worker 0") == 2)
        assert supervisor.pids["frontend 0"] == before["frontend 0"]


def test_repeated_crashes_stop_the_engine(run_dir: str) -> None:
    behaviors = ALL_READY | {"core 0": "crash-on-signal"}
    limits = RecoveryConfig(max_restarts=2)
    with supervisor_of(run_dir, behaviors, recovery=limits) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        Path(f"{run_dir}.die").touch()
        with pytest.raises(
            ProcessFailed, match=r"SIGSEGV.* Stopping the server: core 0 crashed 3 times in a row"
        ):
            supervisor.watch()
    assert lives(run_dir, "core 0") == 3


def test_an_engine_continues_without_its_store(run_dir: str) -> None:
    reports: list[str] = []
    behaviors = ALL_READY | {"store": "crash-on-signal"}
    limits = RecoveryConfig(max_restarts=1)
    with supervisor_of(run_dir, behaviors, recovery=limits, on_recovery=reports.append) as engine:
        engine.start()
        engine.wait_until_ready()
        before = engine.pids
        Path(f"{run_dir}.die store").touch()
        assert eventually(lambda: engine.poll() or lives(run_dir, "store") >= 4)
        assert {**engine.pids, "store": 0} == {**before, "store": 0}
    assert "store was killed by SIGSEGV" in reports[0] and "restarting it" in reports[0]


def test_an_engine_does_not_start_without_its_store(run_dir: str) -> None:
    behaviors = ALL_READY | {"frontend 0": "starting", "store": "fail:the file is in use"}
    with supervisor_of(run_dir, behaviors) as engine:
        engine.start()
        with pytest.raises(ProcessFailed, match="store: the file is in use"):
            engine.wait_until_ready()


TWO_REPLICAS = ALL_READY | {"worker 1": "ready", "core 1": "ready"}
TWO_OF_ALL = TWO_REPLICAS | {"frontend 1": "ready"}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart without long delays, and report crashes more often."""
    monkeypatch.setattr(recovery, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor_module, "REPORT_INTERVAL_CRASHES", 3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["core 1", "frontend 1"])
def test_repeated_crashes_are_retried_while_another_unit_serves(run_dir: str, name: str) -> None:
    messages: list[str] = []
    behaviors = TWO_OF_ALL | {name: "crash-on-signal"}
    limits = RecoveryConfig(max_restarts=1)
    with supervisor_of(
        run_dir, behaviors, recovery=limits, on_recovery=messages.append
    ) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        before = supervisor.pids
        told_to_die = Path(f"{run_dir}.die")
        told_to_die.touch()
        assert eventually(lambda: supervisor.poll() or lives(run_dir, name) >= 8, 30.0)
        told_to_die.unlink()
        operator = Operator(supervisor, run_dir)
        assert operator.sees_ready({name, "core 1", "worker 1"})
        after = supervisor.pids
        operator.close()
    others = before.keys() - {name, "core 1", "worker 1"}
    assert {other: after[other] for other in others} == {other: before[other] for other in others}
    assert messages[0].endswith("; restarting it")
    tried = [
        int(found[1]) for text in messages[1:] if (found := re.search(r"crashed (\d+) times", text))
    ]
    assert tried == list(range(2, 2 + 3 * len(tried), 3)) and len(tried) == len(messages) - 1
    assert "others serve" in messages[1] and "restarted every" in messages[1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("role", ["core", "frontend"])
def test_repeated_crashes_of_the_last_unit_stop_the_engine(run_dir: str, role: str) -> None:
    first, last = f"{role} 0", f"{role} 1"
    behaviors = TWO_OF_ALL | {first: "crash-on-signal", last: "crash-on-signal"}
    limits = RecoveryConfig(max_restarts=1)
    with supervisor_of(run_dir, behaviors, recovery=limits) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        Path(f"{run_dir}.die {first}").touch()
        assert eventually(lambda: supervisor.poll() or lives(run_dir, first) >= 5, 30.0)
        Path(f"{run_dir}.die {last}").touch()
        crashed = r"crashed \d+ times in a row without generating a token"
        with pytest.raises(
            ProcessFailed, match=f"Stopping the server: {role} . {crashed} and {role} . {crashed}"
        ):
            supervisor.watch()


def test_long_ready_replica_resets_its_failure_count(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recovery.STABLE_S, Role.CORE, 0.0)
    limits = RecoveryConfig(max_restarts=1)
    with supervisor_of(run_dir, ALL_READY, recovery=limits) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        for _ in range(3):
            assert operator.sees_ready({"core 0"})
            os.kill(supervisor.pids["core 0"], signal.SIGKILL)
            assert operator.sees_not_ready("core 0")
        assert lives(run_dir, "worker 0") == 1
        operator.close()


def dead(child: Child) -> bool:
    return not child.alive


@pytest.fixture
def unit(run_dir: str) -> Iterator[RecoveryUnit]:
    worker, core = make_specs(make_config(run_dir), {"worker 0": "ready", "core 0": "deaf"})
    unit = RecoveryUnit(core, [worker], 1, LocalProcess)
    unit.start()
    yield unit
    for child in unit.children.values():
        child.kill()
        child.close()


def test_process_is_not_replaced_before_its_exit_is_handled(unit: RecoveryUnit) -> None:
    worker, core = unit.children["worker 0"], unit.children["core 0"]
    worker.kill()
    assert eventually(lambda: dead(worker))
    worker.is_known_dead = True
    unit.record_exit(worker, 5)
    core.kill()
    assert eventually(lambda: dead(core))
    assert unit.recover(math.inf) == [] and core.exit_fd is not None
    core.is_known_dead = True
    unit.record_exit(core, 5)
    assert [child.spec.name for child in unit.recover(math.inf)] == ["worker 0", "core 0"]
    assert unit.num_consecutive_failures == 1


def test_recovery_waits_for_the_final_message_of_a_core(run_dir: str, unit: RecoveryUnit) -> None:
    assert eventually(lambda: "core 0 is deaf" in events(run_dir))
    worker, core = unit.children["worker 0"], unit.children["core 0"]
    worker.kill()
    assert eventually(lambda: dead(worker))
    worker.is_known_dead = True
    unit.record_exit(worker, 5)
    assert unit.recover(math.inf) == [] and core.alive
    assert unit.next_action == core.kill_at
    core.kill()
    assert eventually(lambda: dead(core))


@pytest.mark.parametrize("name", ["frontend 0", "core 0", "worker 0"])
def test_silent_process_is_replaced(run_dir: str, name: str) -> None:
    limits = RecoveryConfig(heartbeat_timeout_s=1.0, max_restarts=20)
    messages: list[str] = []
    stopped: set[int] = set()
    with supervisor_of(
        run_dir, ALL_READY, recovery=limits, on_recovery=messages.append
    ) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()

        def is_found_silent() -> bool:
            # On a busy machine, a process that did not hang may be found silent first, and
            # this one is then restarted with it.
            pid = supervisor.pids.get(name, 0)
            if pid and pid not in stopped:
                os.kill(pid, signal.SIGSTOP)
                stopped.add(pid)
            supervisor.poll()
            return any(text.startswith(f"{name} sent no heartbeat for ") for text in messages)

        assert eventually(is_found_silent, 60.0)
        assert eventually(
            lambda: supervisor.poll() or supervisor.pids.get(name) not in (None, *stopped)
        )


def test_step_timeout_counts_as_a_hang_despite_heartbeats(run_dir: str) -> None:
    limits = RecoveryConfig(step_timeout_s=5.0, max_restarts=0)
    with supervisor_of(run_dir, ALL_READY | {"worker 0": "busy:6"}, recovery=limits) as supervisor:
        supervisor.start()
        with pytest.raises(ProcessFailed, match=r"worker 0 spent 6 s in one step, and was"):
            supervisor.watch()


class Operator:
    """Gives commands and sees what is published, as a frontend does."""

    def __init__(self, supervisor: Supervisor, run_dir: str) -> None:
        self._supervisor = supervisor
        self._context = zmq.Context()
        self._config = config = make_config(run_dir)
        self._reporter = StatusReporter(self._context, config, "operator")
        self._subscriber = StatusSubscriber(self._context, config)
        self._status = EngineStatus([])

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

    def sees_dropped_by(self, name: str, count: int) -> bool:
        return self._sees(
            lambda status: any(
                (p.name, p.num_dropped_frames) == (name, count) for p in status.processes
            )
        )

    def sees_not_ready(self, name: str) -> bool:
        return self._sees(
            lambda status: (
                any(p.name == name and p.stage is not Stage.READY for p in status.processes)
                and not all(replica.is_up for replica in status.replicas)
            )
        )

    def _sees(self, condition: Callable[[EngineStatus], bool]) -> bool:
        def look() -> bool:
            self._supervisor.poll()
            if (status := self._subscriber.receive()) is not None:
                self._status = status
            return condition(self._status)

        return eventually(look)

    def close(self) -> None:
        self._reporter.close()
        self._subscriber.close()
        self._context.term()


@pytest.fixture
def operated(run_dir: str) -> Iterator[tuple[Supervisor, Operator]]:
    with supervisor_of(run_dir, TWO_REPLICAS) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        # The stand-in for a frontend waits for the first replica only.
        assert operator.sees_ready({"core 0", "core 1"})
        yield supervisor, operator
        operator.close()


def test_replica_restart_drains_restarts_and_serves_again(
    run_dir: str, operated: tuple[Supervisor, Operator]
) -> None:
    supervisor, operator = operated
    before = supervisor.pids
    assert operator.sees("serving", "serving")
    operator.command(1, ReplicaAction.RESTART)
    assert operator.sees("serving", "draining")
    assert operator.sees("serving", "restarting")
    assert operator.sees("serving", "serving")
    after = supervisor.pids
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"core 1", "worker 1"}
    assert eventually(lambda: lives(run_dir, "core 1") == lives(run_dir, "worker 1") == 2)


def test_drained_replica_stays_out_until_undrained(
    operated: tuple[Supervisor, Operator],
) -> None:
    supervisor, operator = operated
    before = supervisor.pids
    operator.command(0, ReplicaAction.DRAIN)
    assert operator.sees("drained", "serving")
    operator.command(1, ReplicaAction.DRAIN)
    operator.command(1, ReplicaAction.RESTART)
    operator.command(7, ReplicaAction.DRAIN)
    operator.command(0, ReplicaAction.UNDRAIN)
    assert operator.sees("serving", "serving")
    assert supervisor.pids == before


def test_drain_during_a_restart_follows_the_restart(
    run_dir: str, operated: tuple[Supervisor, Operator]
) -> None:
    supervisor, operator = operated
    before = supervisor.pids
    operator.command(1, ReplicaAction.RESTART)
    assert operator.sees("serving", "restarting")
    operator.command(1, ReplicaAction.RESTART)
    operator.command(1, ReplicaAction.DRAIN)
    assert operator.sees("serving", "drained")
    assert supervisor.pids["core 1"] != before["core 1"]
    assert lives(run_dir, "core 1") == 2
    operator.command(1, ReplicaAction.UNDRAIN)
    assert operator.sees("serving", "serving")


def test_restart_command_during_startup_is_ignored(run_dir: str) -> None:
    messages: list[str] = []
    seen: list[str] = []
    behaviors = TWO_REPLICAS | {"frontend 0": "restarts-a-replica:1"}
    with supervisor_of(
        run_dir,
        behaviors,
        on_status=lambda status: seen.append(status.detail),
        on_recovery=messages.append,
    ) as supervisor:
        supervisor.start()
        operator = Operator(supervisor, run_dir)
        assert eventually(lambda: supervisor.poll() or "has asked for a restart" in seen)
        assert messages == []
        # No replica is reported that a frontend could offer to restart.
        assert operator.sees_stage("frontend 0", Stage.WARMING) and operator.sees()
        operator.close()


def test_last_serving_replica_cannot_be_drained(
    run_dir: str, operated: tuple[Supervisor, Operator]
) -> None:
    supervisor, operator = operated
    before = supervisor.pids["core 0"]
    os.kill(supervisor.pids["core 1"], signal.SIGSTOP)
    os.kill(supervisor.pids["worker 1"], signal.SIGKILL)
    assert operator.sees_not_ready("worker 1")
    operator.command(0, ReplicaAction.RESTART)
    assert operator.sees_ready({"core 1", "worker 1"})
    assert operator.sees("serving", "serving")
    assert supervisor.pids["core 0"] == before


def test_streams_longer_than_the_shutdown_timeout_are_cut(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "DRAIN_GRACE_S", 0.1)
    behaviors = ALL_READY | {"frontend 0": "stubborn"}
    with supervisor_of(run_dir, behaviors, shutdown_timeout_s=0.2) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        pids = supervisor.pids
        supervisor.drain()
        assert "core 0 stopped" in events(run_dir)
    assert not any(map(is_running, pids.values()))


def test_invalid_reports_are_counted_and_dropped(
    operated: tuple[Supervisor, Operator],
) -> None:
    supervisor, operator = operated
    operator.send(
        *(b"", b"\xc1\x00", b"\x92\xa6status", b"x" * 1000),
        encode(Heartbeat("worker 0", pid=1, num_dropped_frames=100)),
        encode(ProcessStatus("nobody", Stage.FAILED, pid=supervisor.pids["core 0"])),
    )
    assert operator.sees_dropped(6)
    assert operator.sees_dropped_by("worker 0", 0)
    assert operator.sees_ready(set(supervisor.pids))


def test_dropped_frames_are_counted_across_restarts(run_dir: str) -> None:
    behaviors = ALL_READY | {"worker 0": "has-dropped:3"}
    with supervisor_of(run_dir, behaviors) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        assert operator.sees_dropped_by("worker 0", 3)
        os.kill(supervisor.pids["worker 0"], signal.SIGKILL)
        assert operator.sees_dropped_by("worker 0", 6)
        operator.close()


def test_children_have_their_own_process_groups(run_dir: str) -> None:
    with supervisor_of(run_dir, ALL_READY) as supervisor:
        supervisor.start()
        assert {os.getpgid(pid) for pid in supervisor.pids.values()} == set(
            supervisor.pids.values()
        )


def test_engine_processes_have_expected_command_lines(run_dir: str) -> None:
    config = replace(make_config(run_dir), parallel=ParallelConfig(api_server_count=2))
    specs = engine_processes(config, Path("/c"), 5)
    assert [(s.name, s.argv[3:], s.pass_fds) for s in specs] == [
        ("worker 0", ("engine.workers", "/c", "0", "0"), ()),
        ("core 0", ("engine.core", "/c", "0"), ()),
        ("store", ("engine.frontend.store", "/c", "0"), ()),
        ("frontend 0", ("engine.frontend", "/c", "0", "5"), (5,)),
        ("frontend 1", ("engine.frontend", "/c", "1", "5"), (5,)),
    ]
    assert [s.name for s in engine_processes(config, Path("/c"), None)] == ["worker 0", "core 0"]
    replicas = replace(
        config, parallel=ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    )
    workers = [s for s in engine_processes(replicas, Path("/c"), None) if "worker" in s.name]
    assert [(s.name, s.argv[-2:]) for s in workers] == [
        ("worker 0", ("0", "0")),
        ("worker 1", ("0", "1")),
        ("worker 2", ("1", "0")),
        ("worker 3", ("1", "1")),
    ]


class SupervisorProcess:
    """A supervisor over stand-ins in a process of its own, so that it can be signalled and killed."""

    def __init__(
        self,
        directory: Path,
        behaviors: dict[str, str],
        shutdown_timeout_s: float = 5.0,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.directory = directory
        command = [sys.executable, str(SUPPORT / "supervise_stand_ins.py")]
        command += [str(directory), str(shutdown_timeout_s)]
        command += [f"{name}={behavior}" for name, behavior in behaviors.items()]
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    def wait_until_ready(self) -> tuple[Path, list[int]]:
        assert self.popen.stdout is not None
        run_dir, *pids = self.popen.stdout.readline().split()
        return Path(run_dir), [int(pid) for pid in pids]

    def wait_for(self, event: str) -> bool:
        def happened() -> bool:
            return any(event in p.read_text() for p in self.directory.glob("*.events"))

        return eventually(happened)

    def finish(self) -> tuple[int, str]:
        _, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SupervisorProcess]]:
    started = []

    def start(behaviors: dict[str, str], **options: Any) -> SupervisorProcess:
        started.append(SupervisorProcess(tmp_path, behaviors, **options))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_signal_drains_and_exits_with_0(
    start: Callable[..., SupervisorProcess], signum: signal.Signals
) -> None:
    # Tests that run under nohup ignore SIGHUP in all child processes.
    process = start(ALL_READY, prepare=lambda: signal.signal(signum, signal.SIG_DFL))
    run_dir, pids = process.wait_until_ready()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    process.popen.send_signal(signum)
    code, errors = process.finish()
    assert code == 0, errors
    assert "draining" in errors
    stopped = [e for e in events(str(run_dir)) if e.endswith("stopped")]
    assert stopped == ["frontend 0 stopped", "core 0 stopped", "worker 0 stopped"]
    assert not run_dir.exists()
    assert not any(map(is_running, pids))


def test_signals_blocked_by_the_parent_still_stop_the_server(
    start: Callable[..., SupervisorProcess],
) -> None:
    stop = {signal.SIGTERM}
    process = start(ALL_READY, prepare=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, stop))
    run_dir, _ = process.wait_until_ready()
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.finish()
    assert code == 0, errors
    stopped = [e for e in events(str(run_dir)) if e.endswith("stopped")]
    assert stopped == ["frontend 0 stopped", "core 0 stopped", "worker 0 stopped"]


def test_sighup_is_ignored_under_nohup(
    start: Callable[..., SupervisorProcess],
) -> None:
    process = start(ALL_READY, prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.wait_until_ready()
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.finish()
    assert code == 0, errors


def test_second_signal_interrupts_the_drain(start: Callable[..., SupervisorProcess]) -> None:
    process = start(ALL_READY | {"frontend 0": "stubborn"}, shutdown_timeout_s=600)
    run_dir, pids = process.wait_until_ready()
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.stderr is not None
    assert any("draining" in line for line in process.popen.stderr)
    process.popen.send_signal(signal.SIGINT)
    code, _ = process.finish()
    assert code == 128 + signal.SIGINT
    assert not run_dir.exists()
    assert not any(map(is_running, pids))


def test_stop_signal_before_ready_exits_immediately(
    start: Callable[..., SupervisorProcess],
) -> None:
    process = start(ALL_READY | {"frontend 0": "starting"}, shutdown_timeout_s=600)
    assert process.wait_for("core 0 started")
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.finish()
    assert (code, "draining" in errors) == (0, False)
    assert not list(process.directory.glob("engine-????????"))


def test_failure_is_the_last_line_with_exit_code_1(
    start: Callable[..., SupervisorProcess],
) -> None:
    process = start(ALL_READY | {"core 0": "fail:no memory for 3 blocks; lower --max-model-len"})
    code, errors = process.finish()
    assert code == 1
    assert errors.splitlines()[-1] == (
        "engine: error: core 0: no memory for 3 blocks; lower --max-model-len"
    )
    assert not list(process.directory.glob("engine-????????"))


def test_no_process_outlives_a_killed_supervisor(
    start: Callable[..., SupervisorProcess],
) -> None:
    process = start(ALL_READY)
    run_dir, pids = process.wait_until_ready()
    process.popen.send_signal(signal.SIGKILL)
    process.finish()
    assert eventually(lambda: not any(map(is_running, pids)))
    assert not run_dir.exists()


def test_supervisor_imports_no_heavy_modules(start: Callable[..., SupervisorProcess]) -> None:
    process = start(ALL_READY)
    process.wait_until_ready()
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert match is not None
    assert int(match[1]) < 40_000
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert not re.search(r"/(numpy|torch|tokenizers)/", maps)
