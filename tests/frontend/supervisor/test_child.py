"""The supervisor's view of a child process: exit summaries and step rates."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine.frontend.supervisor import local_process
from engine.frontend.supervisor.child import Child
from engine.frontend.supervisor.launcher import Launcher
from engine.frontend.supervisor.local_process import ProcessSpec, Role
from engine.protocol.supervisor_messages import Heartbeat, Stage
from support.processes.program import wait_until


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.mark.parametrize(
    ("signum", "name"),
    [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_exit_summary_names_the_signal(launcher: Launcher, signum: int, name: str) -> None:
    program = "import os, sys; os.kill(os.getpid(), int(sys.argv[1]))"
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-S", "-c", program, str(int(signum))))
    process = launcher.launch(spec, 1)
    child = Child(spec, 1, process)
    process.close()
    assert child.exit_summary() == f"core 0 was killed by {name}; see its messages above"
    child.close()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("oom_kill 3\n", "oom_kill 3\n", "but not by the kernel's out-of-memory killer"),
        (
            "oom_kill 3\n",
            "oom_kill 4\n",
            "probably by the kernel's out-of-memory killer, .*; free memory, or lower --kv",
        ),
        ("nr_free_pages 3\n", "nr_free_pages 4\n", "possibly by the kernel's out-of-memory killer"),
    ],
)
def test_exit_summary_says_whether_the_oom_killer_was_active(
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    said: str,
) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(local_process, "VMSTAT", vmstat)
    vmstat.write_text(before)
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-c", "input()"))
    process = launcher.launch(spec, 1)
    child = Child(spec, 1, process)
    vmstat.write_text(after)
    child.kill()
    process.close()
    assert re.match(f"core 0 was killed by SIGKILL, {said}", child.exit_summary())
    child.close()


def test_delayed_heartbeats_do_not_raise_the_step_rate(launcher: Launcher) -> None:
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-c", "input()"))
    process = launcher.launch(spec, 1)
    try:
        child = Child(spec, 1, process)
        for num_steps in (50, 100, 150):
            child.beat(Heartbeat(num_steps=num_steps), time.monotonic())
        assert 0 < child.process_info(time.monotonic(), 0, 0).steps_per_s <= 100
    finally:
        process.kill()
        process.close()
        if process.exit_fd is not None:
            os.close(process.exit_fd)


def test_a_silent_process_that_waits_for_the_machine_does_not_hang(
    launcher: Launcher, tmp_path: Path
) -> None:
    busy = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); #\nwhile True: pass"
    starved = busy.replace("#", "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    # Until its child has opened a pipe that nobody writes to, the process is in state D, as while a disk is read.
    os.mkfifo(tmp_path / "pipe")
    open_pipe = f"(os.POSIX_SPAWN_OPEN, 0, {os.fspath(tmp_path / 'pipe')!r}, os.O_RDONLY, 0)"
    blocked = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{open_pipe}])"
    children = []
    for program in (busy, starved, blocked, "input()"):
        spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-S", "-c", program))
        children.append(Child(spec, 1, launcher.launch(spec, 1)))
    try:
        for child in children:
            child.beat(Heartbeat(is_ready=True), time.monotonic())

        def hangs(child: Child, silent_s: float) -> bool:
            return bool(child.find_hang(child.last_beat + silent_s, 1.0, 100.0))

        _, *waiting, idle = children
        wait_until(lambda: psutil.Process(idle.pid).status() == psutil.STATUS_SLEEPING)
        wait_until(lambda: psutil.Process(waiting[1].pid).status() == psutil.STATUS_DISK_SLEEP)
        assert not any(hangs(child, 0.6) for child in children)
        # A wait counts before it ends, which for this process may take a second.
        for child in waiting:
            wait_until(lambda child=child: not hangs(child, 1.4), 0.8, what="it waited for 0.4 s")
            assert hangs(child, 5.1)
        assert hangs(idle, 1.4)
    finally:
        for child in children:
            child.kill()
            child.close()


def test_a_process_whose_exit_cannot_be_watched_is_killed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", fail)
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-c", "input()"))
    process = launcher.launch(spec, 1)
    process.close()
    assert process.poll() == -signal.SIGKILL
    assert process.reason == "cannot watch the process: Too many open files"


def test_process_that_beats_as_ready_stays_ready_when_earlier_reports_arrive(
    launcher: Launcher,
) -> None:
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-S", "-c", ""))
    child = Child(spec, 1, launcher.launch(spec, 1))
    child.beat(Heartbeat(is_ready=True), time.monotonic())
    stages = [child.stage]
    for stage in (Stage.STARTING, Stage.WARMING, Stage.READY, Stage.DRAINING):
        child.enter_stage(stage, "")
        stages.append(child.stage)
    assert stages == [Stage.READY] * 4 + [Stage.DRAINING]
    child.close()
