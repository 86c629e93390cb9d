"""Life cycle of an engine's processes, with small real processes in place of the large ones."""

import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from engine.frontend.supervisor import recovery
from engine.frontend.supervisor import supervisor as supervisor_module
from engine.frontend.supervisor.child import Child
from engine.frontend.supervisor.engine_processes import engine_processes
from engine.frontend.supervisor.launcher import Launcher
from engine.frontend.supervisor.local_process import ProcessSpec, Role
from engine.frontend.supervisor.recovery import RecoveryUnit
from engine.frontend.supervisor.supervisor import ProcessFailed, Supervisor
from engine.protocol.config import ParallelConfig, RecoveryConfig
from engine.protocol.supervisor_messages import ProcessStatus, Stage
from msgspec.structs import replace
from support.processes.open_contexts import open_contexts
from support.processes.stand_ins import make_config, make_specs
from support.processes.supervised import (
    ALL_READY,
    TWO_OF_ALL,
    TWO_REPLICAS,
    Operator,
    events,
    lives,
    supervisor_of,
)
from support.processes.waiting import eventually, is_running

pytestmark = pytest.mark.slow


def test_failed_construction_closes_everything(run_dir: str) -> None:
    before = open_contexts()
    # A socket cannot be bound to the path of a directory.
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
        replace(spec, argv=(str(program), *spec.argv[1:])) for spec in make_specs(config, ALL_READY)
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


def test_crashed_core_is_replaced_and_its_worker_kept(run_dir: str) -> None:
    messages: list[str] = []
    with supervisor_of(run_dir, ALL_READY, on_recovery=messages.append) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        operator = Operator(supervisor, run_dir)
        assert operator.sees_ready(set(ALL_READY))
        before = supervisor.pids
        os.kill(before["core 0"], signal.SIGSEGV)
        assert eventually(lambda: operator.look() or operator.has_resumed)
        assert eventually(lambda: operator.look() or lives(run_dir, "core 0") == 2)
        operator.close()
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
        operator = Operator(supervisor, run_dir)
        assert operator.sees_ready(set(ALL_READY))
        before = supervisor.pids
        os.kill(before["worker 0"], signal.SIGSEGV)
        assert operator.sees_not_ready("worker 0")
        assert eventually(lambda: operator.look() or lives(run_dir, "worker 0") == 2)
        assert supervisor.pids["core 0"] != before["core 0"]
        assert not operator.has_resumed
        operator.close()
        assert supervisor.pids["frontend 0"] == before["frontend 0"]


@pytest.mark.parametrize("has_cause", [True, False])
def test_worker_aborted_for_a_lost_peer_is_not_reported_before_the_cause(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, has_cause: bool
) -> None:
    monkeypatch.setattr(supervisor_module, "CAUSE_S", 30.0 if has_cause else 0.1)
    parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    config = replace(make_config(run_dir), parallel=parallel)
    messages: list[str] = []
    with Supervisor(
        config, make_specs(config, TWO_REPLICAS), on_recovery=messages.append
    ) as supervisor:
        supervisor.start()
        supervisor.wait_until_ready()
        assert eventually(lambda: supervisor.poll() or lives(run_dir, "worker 1") == 1)
        os.kill(supervisor.pids["worker 0"], signal.SIGABRT)
        if has_cause:
            assert eventually(lambda: supervisor.poll() or "worker 0" not in supervisor.pids)
            os.kill(supervisor.pids["worker 1"], signal.SIGKILL)
        assert eventually(lambda: supervisor.poll() or lives(run_dir, "worker 0") == 2)
    [message] = messages
    killed = "worker 1 was killed by SIGKILL" if has_cause else "worker 0 was killed by SIGABRT"
    assert message.startswith(killed)


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart without long delays, and report crashes more often."""
    monkeypatch.setattr(recovery, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(recovery, "REPORT_INTERVAL_CRASHES", 3)


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
    launcher = Launcher()
    unit = RecoveryUnit(core, [worker], 1, launcher)
    unit.start()
    yield unit
    for child in unit.children.values():
        child.kill()
        child.close()
    launcher.close()


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
        ("frontend 0", ("engine.frontend", "/c", "0", "5"), (5,)),
        ("frontend 1", ("engine.frontend", "/c", "1", "5"), (5,)),
        ("worker 0", ("engine.workers", "/c", "0", "0"), ()),
        ("core 0", ("engine.core", "/c", "0"), ()),
        ("store", ("engine.frontend.store", "/c", "0"), ()),
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
