"""Signals to the process of a supervisor, and its end."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.supervised import ALL_READY, events
from support.processes.waiting import eventually, is_running

pytestmark = pytest.mark.slow


PROCESSES = Path(__file__).parents[2] / "support" / "processes"


class SupervisorProcess:
    """A supervisor over stand-ins in its own process, so that it can be signalled and killed."""

    def __init__(
        self,
        directory: Path,
        behaviors: dict[str, str],
        shutdown_timeout_s: float = 5.0,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.directory = directory
        command = [sys.executable, str(PROCESSES / "supervise_stand_ins.py")]
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
