"""A replica recovers from crashes in any order, and no process is replaced while it still runs."""

import math
import signal
import time

from engine.frontend.supervisor.child import Child
from engine.frontend.supervisor.launcher import Launcher
from engine.frontend.supervisor.local_process import ProcessSpec, Role
from engine.frontend.supervisor.recovery import RecoveryUnit
from engine.protocol.supervisor_messages import Heartbeat, Stage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.suite.examples import examples

MAX_RESTARTS = 3


class Simulated:
    """A process that exits when the test says so, even after it was killed."""

    def __init__(self, spec: ProcessSpec, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        self.pid = 1
        self.exit_fd: int | None = None
        self.reason = ""
        self.saw_oom_kills = None
        self.returncode: int | None = None
        self.is_to_end = False
        self.is_closed = False

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: signal.Signals) -> None:
        assert signum is signal.SIGUSR2 and self.spec.role is Role.CORE
        self.is_to_end = True

    def kill(self) -> None:
        self.is_to_end = True

    def end(self) -> None:
        self.returncode = -signal.SIGKILL

    def close(self) -> None:
        assert self.returncode is not None and not self.is_closed
        self.is_closed = True


class SimulatedLauncher(Launcher):
    """Starts simulated processes, each after its predecessor has ended and in a later epoch."""

    def __init__(self) -> None:
        self.processes: dict[str, Simulated] = {}

    def launch(self, spec: ProcessSpec, epoch: int) -> Simulated:
        before = self.processes.get(spec.name)
        if before is not None:
            assert before.is_closed and before.epoch < epoch
        self.processes[spec.name] = Simulated(spec, epoch)
        return self.processes[spec.name]


class Replica(RuleBasedStateMachine):
    @initialize(num_workers=st.integers(1, 2), node=st.sampled_from([None, 1]))
    def start(self, num_workers: int, node: int | None) -> None:
        launcher = SimulatedLauncher()
        self.processes = launcher.processes
        core = ProcessSpec("core 0", Role.CORE, ())
        workers = [
            ProcessSpec(f"worker {rank}", Role.WORKER, (), node=node) for rank in range(num_workers)
        ]
        self.can_outlive = num_workers == 1 or node is None
        self.names = {spec.name for spec in (core, *workers)}
        self.unit = RecoveryUnit(core, workers, 1, launcher)
        self.unit.start()

    @property
    def children(self) -> list[Child]:
        return list(self.unit.children.values())

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.processes[data.draw(st.sampled_from(sorted(self.names)))].end()

    @rule(data=st.data())
    def exit_as_requested(self, data: st.DataObject) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.names)))]
        if process.is_to_end:
            process.end()

    @rule(num_tokens=st.integers(0, 1))
    def serve(self, num_tokens: int) -> None:
        core = self.unit.children["core 0"]
        if core.alive:
            core.enter_stage(Stage.READY, "")
            core.beat(Heartbeat(num_tokens=num_tokens), time.monotonic())

    @rule()
    def find_cause(self) -> None:
        self.unit.record_cause_found(MAX_RESTARTS)

    @rule()
    def restart(self) -> None:
        self.unit.restart(0.0)

    @rule()
    def see_to_ends(self) -> None:
        for child in self.children:
            if not child.alive and not child.is_known_dead:
                child.is_known_dead = True
                self.unit.record_exit(child, MAX_RESTARTS)

    @rule()
    def recover(self) -> None:
        unseen = [child for child in self.children if not child.alive and not child.is_known_dead]
        alive = {child.spec.name for child in self.children if child.alive}
        started = {child.spec.name for child in self.unit.recover(math.inf)}
        if started:
            assert not unseen
            assert started | alive == self.names and not started & alive
            assert started == self.names or (started == {"core 0"} and self.can_outlive)

    @invariant()
    def one_that_is_down_does_not_serve(self) -> None:
        unit = self.unit
        assert set(unit.children) == self.names
        assert not (unit.is_up and unit.is_lost) and not (unit.is_up and unit.is_down)
        assert all(child.epoch <= unit.epoch for child in self.children)

    def teardown(self) -> None:
        if not hasattr(self, "unit"):
            return
        for _ in range(4):
            for process in self.processes.values():
                if process.is_to_end:
                    process.end()
            self.see_to_ends()
            self.recover()
        assert all(child.alive for child in self.children) and not self.unit.is_down
        assert self.unit.children["core 0"].epoch == self.unit.epoch


Replica.TestCase.settings = examples(150, stateful_step_count=40)
TestReplica = Replica.TestCase


def test_frontend_that_crashes_thousands_of_times_is_restarted_each_time() -> None:
    launcher = SimulatedLauncher()
    unit = RecoveryUnit(ProcessSpec("frontend 0", Role.FRONTEND, ()), [], 1, launcher)
    unit.start()
    for _ in range(2000):
        child = unit.children["frontend 0"]
        child.enter_stage(Stage.READY, "")
        launcher.processes["frontend 0"].end()
        child.is_known_dead = True
        unit.record_exit(child, MAX_RESTARTS)
        [restarted] = unit.recover(math.inf)
        assert restarted.alive
