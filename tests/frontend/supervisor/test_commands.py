"""Commands to a supervisor, and what it publishes."""

import os
import signal
from collections.abc import Iterator

import pytest
from engine.frontend.supervisor import recovery
from engine.frontend.supervisor import supervisor as supervisor_module
from engine.frontend.supervisor.supervisor import Supervisor
from engine.protocol.config import RecoveryConfig
from engine.protocol.supervisor_messages import Heartbeat, ProcessStatus, ReplicaAction, Stage
from engine.protocol.transport import encode
from support.processes.supervised import (
    ALL_READY,
    TWO_REPLICAS,
    Operator,
    events,
    lives,
    supervisor_of,
)
from support.processes.waiting import eventually, is_running

pytestmark = pytest.mark.slow


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


def test_only_changes_wake_frontends(run_dir: str, operated: tuple[Supervisor, Operator]) -> None:
    supervisor, operator = operated
    assert operator.sees_ready(set(supervisor.pids))
    assert operator.sees_silence()
    operator.command(0, ReplicaAction.DRAIN)
    assert operator.sees("drained", "serving") and not operator.sees_silence(timeout_s=0.5)
    operator.command(0, ReplicaAction.UNDRAIN)
    assert operator.sees("serving", "serving") and operator.sees_silence()


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
        encode(Heartbeat("worker 0", pid=supervisor.pids["worker 0"], num_dropped_frames=100)),
        encode(ProcessStatus("nobody", Stage.FAILED, pid=supervisor.pids["core 0"])),
    )
    assert operator.sees_dropped(6)
    assert operator.sees_dropped_by_worker(0)
    assert operator.sees_ready(set(supervisor.pids))


def test_dropped_frames_are_counted_across_restarts(run_dir: str) -> None:
    behaviors = ALL_READY | {"worker 0": "has-dropped:3"}
    with supervisor_of(run_dir, behaviors) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        assert operator.sees_dropped_by_worker(3)
        os.kill(supervisor.pids["worker 0"], signal.SIGKILL)
        assert operator.sees_dropped_by_worker(6)
        operator.close()


def test_replicas_sleep_without_processes_until_they_wake(
    run_dir: str, operated: tuple[Supervisor, Operator]
) -> None:
    supervisor, operator = operated
    frontend = supervisor.pids["frontend 0"]
    for replica in (0, 1):
        operator.command(replica, ReplicaAction.SLEEP)
    assert operator.sees("sleeping", "sleeping")
    assert eventually(lambda: operator.look() or set(supervisor.pids) == {"frontend 0"})
    for action in (ReplicaAction.DRAIN, ReplicaAction.RESTART, ReplicaAction.UNDRAIN):
        operator.command(1, action)
    assert operator.sees_silence() and operator.sees("sleeping", "sleeping")
    operator.command(1, ReplicaAction.WAKE)
    assert operator.sees("sleeping", "serving")
    operator.command(0, ReplicaAction.WAKE)
    assert operator.sees("serving", "serving")
    assert supervisor.pids["frontend 0"] == frontend
    names = ("core 0", "core 1", "worker 0", "worker 1")
    assert eventually(lambda: {lives(run_dir, name) for name in names} == {2})


def test_a_core_that_does_not_exit_is_killed_to_sleep(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SLEEP_S", 0.3)
    with supervisor_of(run_dir, ALL_READY | {"core 0": "stubborn"}) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        for pids in ({"frontend 0"}, {"frontend 0", "worker 0"}):
            operator.command(0, ReplicaAction.SLEEP)
            # The second time, the core's exit has been handled, but not that of its worker.
            assert eventually(lambda pids=pids: operator.look() or set(supervisor.pids) <= pids)
            operator.look()
            operator.command(0, ReplicaAction.WAKE)
            assert operator.sees("serving")
        operator.close()


def test_idle_replicas_sleep(run_dir: str) -> None:
    limits = RecoveryConfig(sleep_idle_s=0.2)
    messages: list[str] = []
    with supervisor_of(
        run_dir, TWO_REPLICAS, recovery=limits, on_recovery=messages.append
    ) as supervisor:
        supervisor.start()
        operator = Operator(supervisor, run_dir)
        assert operator.sees("sleeping", "sleeping")
        assert messages == ["no request came: the model is unloaded until the next one"]
        operator.command(0, ReplicaAction.WAKE)
        operator.command(1, ReplicaAction.WAKE)
        assert operator.sees("serving", "serving") and operator.sees("sleeping", "sleeping")
        operator.close()
