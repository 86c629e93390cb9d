"""Start programs by a fork of a process that has imported most of their libraries, which saves seconds for each."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from engine.frontend.supervisor.guardian.fork_server import MODULES, ForkServer
from engine.frontend.supervisor.guardian.guardian import become_subreaper

LIBRARIES: Final = (
    "engine.frontend.cli.serve",
    "engine.frontend.model_source.config",
    *(module for modules in MODULES for module in modules.values()),
)

THREADS: Final = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # Threads of OpenBLAS would not exist in a forked process.
    "OPENBLAS_NUM_THREADS": "1",
}
TESTS: Final = str(Path(__file__).parents[2])
PROGRAM: Final = """
import importlib, socket, sys
sys.path.insert(0, sys.argv[2])
import support.processes.hidden_torch
del sys.path[0]
for name in sys.argv[3:]:
    importlib.import_module(name)
from engine.frontend.supervisor.guardian.fork_server import run_fork_server
run_fork_server(socket.socket(fileno=int(sys.argv[1])), {})
"""


class ForkedProcess:
    """A program as a child process, with the methods of `subprocess.Popen` that tests use.

    `arguments` begin with the name of the module. Standard output and error are one pipe, unless `stdout` is a
    descriptor.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str] = os.environ,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        read_stdin, write_stdin = os.pipe()
        read_stdout, write_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(write_stdin, "w"), os.fdopen(read_stdout)
        output = write_stdout if stdout is None else stdout
        fds = {0: read_stdin, 1: output, 2: output} | {fd: fd for fd in pass_fds}
        try:
            self.pid = fork_server().fork(arguments, env, fds)
        finally:
            os.close(read_stdin)
            os.close(write_stdout)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            exit_fd = os.pidfd_open(self.pid)
            try:
                if not select.select([exit_fd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            finally:
                os.close(exit_fd)
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process, which becomes the parent of the forked processes."""
    assert become_subreaper()
    return _PreloadedForkServer()


class _PreloadedForkServer(ForkServer):
    reply_s = 240.0

    def __init__(self) -> None:
        # This process has threads, so it cannot fork the server itself.
        connection, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with requests:
            pid = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(requests.fileno()), TESTS, *LIBRARIES],
                pass_fds=[requests.fileno()],
                env={**os.environ, **THREADS},
            ).pid
        super().__init__({}, pid, connection)
