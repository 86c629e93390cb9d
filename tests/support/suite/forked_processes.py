"""Tests in several processes: `scripts/test --processes 4`.

All tests are collected once, and then the process forks, so that each library is imported once and its memory is
shared. pytest-xdist would collect them again in each of its processes, which takes longer than most files of tests.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import random
import signal
import traceback
from collections import deque
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

FOLDERS_WITH_SERVERS = {"e2e", "chaos", "hostile"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=1, metavar="N", help="run the tests in N forked processes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.processes < 2 or config.option.collectonly or session.testsfailed:
        return None
    TestProcesses(session).run(config.option.processes)
    return True


class TestProcesses:
    """The processes that run the tests, and the tests that none of them runs yet.

    A process takes one file after another. Once no file is left, it takes half of the tests of the process that has the
    most, so that all end at about the same time.
    """

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.files = deque(_files_by_cost(session.items))
        self.tests_by_process: dict[Connection, deque[int]] = {}
        self.running: dict[Connection, list[int]] = {}
        """The test that each process runs now, and the next one, which decides which fixtures it keeps."""
        self.pids: dict[Connection, int] = {}

    def run(self, processes: int) -> None:
        # All processes make their folders in this one.
        self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            for _ in range(min(processes, len(self.session.items))):
                self._start(deque())
            while self.pids:
                for connection in wait(list(self.pids)):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def _start(self, tests: deque[int]) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            ours.close()
            for connection in self.pids:
                connection.close()
            _run_tests(self.session, theirs)
        theirs.close()
        self.pids[ours], self.tests_by_process[ours], self.running[ours] = pid, tests, []
        self._send_next(ours)
        self._send_next(ours)

    def _send_next(self, connection: Connection) -> None:
        tests = self.tests_by_process[connection]
        if not tests and self.files:
            tests.extend(self.files.popleft())
        if not tests:
            longest = max(self.tests_by_process.values(), key=len)
            tests.extendleft(longest.pop() for _ in range(len(longest) // 2))
        stopped = self.session.shouldfail or self.session.shouldstop
        test = tests.popleft() if tests and not stopped else None
        if test is not None:
            self.running[connection].append(test)
        # If the process has ended, so do its messages.
        with contextlib.suppress(OSError):
            connection.send(test)

    def _receive(self, connection: Connection) -> None:
        hook = self.session.config.hook
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "ended", None
        match kind:
            case "report":
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(
                        config=self.session.config, data=value
                    )
                )
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=value)
            case "error":
                raise RuntimeError(f"a process of tests failed:\n{value}")
            case "finished":
                self.running[connection].pop(0)
                self._send_next(connection)
            case "ended":
                self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Remove a process that has ended. If it was killed, report its test and start another one."""
        _, status = os.waitpid(self.pids.pop(connection), 0)
        tests, running = self.tests_by_process.pop(connection), self.running.pop(connection)
        connection.close()
        if not running:
            return
        item = self.session.items[running[0]]
        cause = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
        self.session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", cause, "call")
        )
        tests.extendleft(reversed(running[1:]))
        self._start(tests)


class _Reporter:
    """Sends the reports and warnings of a process to the one that collected the tests."""

    registered = False

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config = config
        self.connection = connection
        # Registering it repeats the warnings that were recorded before the fork.
        config.pluginmanager.register(self)
        self.registered = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.registered:
            return
        # It may be an object that cannot be sent.
        warning_message.source = None
        self.connection.send(
            (
                "warning",
                {
                    "warning_message": warning_message,
                    "when": when,
                    "nodeid": nodeid,
                    "location": location,
                },
            )
        )


def _run_tests(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run the tests whose numbers arrive until there is none, and end the process."""
    status = 1
    try:
        config = session.config
        random.seed()
        # pytest-timeout needs one.
        terminal_reporter = pytest.TerminalReporter(config, io.StringIO())
        terminal_reporter.pytest_sessionstart(session)
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(terminal_reporter, "terminalreporter")
        # The files that hold captured output would be shared with the other processes.
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        _Reporter(config, connection)
        test, following = connection.recv(), connection.recv()
        while test is not None:
            config.hook.pytest_runtest_protocol(
                item=session.items[test],
                nextitem=None if following is None else session.items[following],
            )
            connection.send(("finished", None))
            test, following = following, None if following is None else connection.recv()
        atexit._run_exitfuncs()  # noqa: SLF001
        status = 0
    except Exception:
        connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(status)


def _files_by_cost(items: list[pytest.Item]) -> list[list[int]]:
    """The numbers of the tests of each file: files with servers first and quick ones last."""
    files: dict[Any, list[int]] = {}
    for number, item in enumerate(items):
        files.setdefault(item.path, []).append(number)
    return sorted(
        files.values(), key=lambda tests: -max(map(_cost, (items[test] for test in tests)))
    )


def _cost(item: pytest.Item) -> int:
    if FOLDERS_WITH_SERVERS & set(item.path.parts):
        return 2
    return 1 if item.get_closest_marker("slow") else 0
