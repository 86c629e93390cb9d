import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from engine.frontend.cli.fork import ForkFailed, run_in_fork
from engine.frontend.supervisor.signals import StopRequested, StopSignals
from engine.protocol.errors import ConfigError
from support.processes.waiting import eventually, is_running


class Answer(msgspec.Struct):
    pid: int
    modules: list[str]


def test_fork_returns_the_result_without_its_imports() -> None:
    sys.modules.pop("this_module_is_imported", None)

    def compute() -> Answer:
        sys.modules["this_module_is_imported"] = sys
        return Answer(os.getpid(), [m for m in sys.modules if m.startswith("this_module")])

    with StopSignals() as signals:
        answer = run_in_fork(compute, Answer, signals)
    assert answer.pid != os.getpid()
    assert answer.modules == ["this_module_is_imported"]
    assert "this_module_is_imported" not in sys.modules


def test_fork_works_when_sigchld_is_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            assert run_in_fork(lambda: Answer(1, []), Answer, signals) == Answer(1, [])
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_engine_error_in_fork_keeps_its_message() -> None:
    def compute() -> Answer:
        raise ConfigError("no such model; check the path")

    with (
        StopSignals() as signals,
        pytest.raises(ForkFailed, match=r"^no such model; check the path$"),
    ):
        run_in_fork(compute, Answer, signals)


def test_unexpected_error_in_fork_prints_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def compute() -> Answer:
        raise ZeroDivisionError("by nought")

    with StopSignals() as signals, pytest.raises(ForkFailed, match="compute exited with code 1"):
        run_in_fork(compute, Answer, signals)
    assert "ZeroDivisionError: by nought" in capfd.readouterr().err


HOST = """
import os, subprocess, sys, tempfile, time
from engine.frontend.cli.fork import run_in_fork
from engine.frontend.supervisor.signals import StopRequested, StopSignals

def compute():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        process = subprocess.Popen(["sleep", "600"])
        print(os.getpid(), process.pid, flush=True)
        process.wait()

with StopSignals() as signals:
    try:
        run_in_fork(compute, int, signals)
    except StopRequested as stop:
        sys.exit(str(stop))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopping_the_parent_ends_the_fork_and_its_children(
    tmp_path: Path, signum: signal.Signals
) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    pids = [int(pid) for pid in host.stdout.readline().split()]
    assert len(list(tmp_path.iterdir())) == 1
    if signum == signal.SIGTERM:
        # It may be sent to all processes at once.
        for pid in pids:
            os.kill(pid, signum)
    host.send_signal(signum)
    _, errors = host.communicate(timeout=20)
    if signum != signal.SIGKILL:
        assert (host.returncode, errors.strip()) == (1, signum.name)
    assert eventually(lambda: not any(map(is_running, pids)))
    assert not list(tmp_path.iterdir())


def test_simultaneous_stop_signals_count_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        signals.raise_if_received()
        for names in (("SIGTERM", "SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")):
            for name in names:
                signal.raise_signal(signal.Signals[name])
            with pytest.raises(StopRequested, match=names[0]):
                signals.raise_if_received()
            signals.raise_if_received()
    assert signal.getsignal(signal.SIGTERM) is before
