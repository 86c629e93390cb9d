"""Processes that have loaded the modules of the processes of an engine, and fork those processes.

A fork takes a few milliseconds. A new Python process that loads its modules takes half a second of processor time. The
fork servers load them while the engine's model is looked up, and each restarted process finds them loaded. There are
two, which load at the same time: one for cores and workers, and one for frontends and the store.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from ....protocol.config import EngineConfig
from ....protocol.imports import bare_numpy
from ....protocol.process import ORPHANED_EXIT_CODE, ignore_stop_signals, name_process

MODULES: Final = (
    {
        "engine.frontend": "engine.frontend.api.server",
        "engine.frontend.store": "engine.frontend.store.engine_store",
    },
    {
        "engine.workers": "engine.workers.preloaded",
        "engine.core": "engine.core.preloaded",
    },
)
"""The module that each program of each fork server needs, in the order in which the programs start."""

COMMON_MODULES: Final = (
    "engine.protocol.transport",
    "engine.protocol.checkpoint.gguf",
    "engine.protocol.encoder_inputs.payloads",
    "engine.protocol.grammars.process",
)
"""Modules that programs of both fork servers need besides numpy, and whose memory they share."""

QUIET_S: Final = 0.1
"""Seconds without a request after which another module is loaded, once there has been a request."""

LOOK_S: Final = 0.2
"""Seconds between two calls of `while_waiting`."""

STOPPED_LOOKS: Final = 5
"""Successive looks at which a fork server was stopped by a signal, after which it is given up."""

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_FDS: Final = 16


class _ForkRequest(msgspec.Struct, array_like=True):
    """A process to fork.

    Attributes:
        arguments: The name of the program's module, then its arguments.
        environment: The environment variables of the process.
        fds: The numbers that the sent file descriptors get in the process.
    """

    arguments: list[bytes]
    environment: dict[bytes, bytes]
    fds: list[int]


class ForkServer:
    """The connection to a fork server.

    The fork server exits when all processes have closed the connection.

    Attributes:
        modules: Program that it forks -> the module that the program needs.
        pid: The process ID of the fork server.
        socket: Sends requests. Receives a byte when all modules have been imported.
    """

    reply_s = 10.0
    """Maximum seconds to wait for a fork; a module may still be loading from a slow disk."""

    def __init__(self, modules: Mapping[str, str], pid: int, connection: socket.socket) -> None:
        self.modules, self.pid, self.socket = modules, pid, connection

    @classmethod
    def start(cls, modules: Mapping[str, str]) -> ForkServer:
        """Fork a fork server from this process, which must not have threads."""
        connection, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            run_fork_server(requests, modules)
        requests.close()
        return cls(modules, pid, connection)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Mapping[int, int],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> int:
        """Run a Python module as a program in a new process, and return the process ID.

        The process is the leader of a new process group. It becomes a child of the nearest ancestor that is a
        subreaper, for example of the guardian.

        Args:
            arguments: The name of the module, then the arguments of the program.
            environment: All environment variables of the process.
            fds: The numbers of file descriptors in the process, and the descriptors of this process that they refer
                to. Only standard output and error are inherited otherwise.
            while_waiting: Called several times a second while the fork server does not answer.

        Raises:
            OSError: The fork server has exited, cannot fork, or did not answer and was killed.
        """
        request = _ForkRequest(
            [os.fsencode(each) for each in arguments],
            {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            list(fds),
        )
        reply, child = socket.socketpair()
        with reply, child:
            data = msgspec.msgpack.encode(request)
            socket.send_fds(self.socket, [data], [child.fileno(), *fds.values()])
            child.close()
            deadline, num_stopped = time.monotonic() + self.reply_s, 0
            while not select.select([reply], [], [], LOOK_S)[0]:
                while_waiting()
                num_stopped = num_stopped + 1 if _is_stopped(self.pid) else 0
                if num_stopped >= STOPPED_LOOKS or time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    raise TimeoutError("no answer in time")
            answer = reply.recv(16)
            if not answer:
                raise OSError(errno.ECHILD, "the fork server did not fork")
            # The process exits unless it receives this, so that no process remains without an owner.
            reply.send(b"+")
            return int(answer)

    def close(self) -> None:
        """Close the connection in this process."""
        self.socket.close()


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def start_fork_servers() -> Iterator[dict[str, ForkServer]]:
    """Start the fork servers of an engine, and return the one of each program. They exit with the context.

    There are none except on Linux, because they need a guardian, which an engine does not have elsewhere.
    """
    servers: dict[str, ForkServer] = {}
    if sys.platform == "linux":
        _import_common_modules()
        for modules in MODULES:
            servers |= dict.fromkeys(modules, ForkServer.start(modules))
    try:
        yield servers
    finally:
        stop_fork_servers(servers)


def stop_fork_servers(servers: dict[str, ForkServer]) -> None:
    """Stop the fork servers and remove them from the dictionary. They may still be importing modules."""
    for server in set(servers.values()):
        server.close()
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server.pid, 0)
    servers.clear()


def _import_common_modules() -> None:
    environment = dict(os.environ)
    # Threads would not exist in a forked process.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    bare_numpy.install()
    for name in COMMON_MODULES:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(environment)
    # Its first decoder evaluates the annotations, which is most of the time in which a process reads its configuration.
    msgspec.msgpack.Decoder(EngineConfig)


def run_fork_server(requests: socket.socket, modules: Mapping[str, str]) -> NoReturn:
    """Fork processes until the other ends of `requests` are closed, then exit.

    A program of `modules` is forked after its module has been imported. While there is no request, the other modules
    are imported, so that a process which is restarted later finds its module. A byte is sent after the last one.
    """
    code = 1
    try:
        _prepare(requests)
        pids = os.pipe()
        remaining, quiet_s = dict(modules), 0.0
        while True:
            if remaining and not select.select([requests], [], [], quiet_s)[0]:
                importlib.import_module(remaining.pop(next(iter(remaining))))
                if not remaining:
                    requests.send(b"+")
                continue
            data, fds, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, MAX_FDS)
            if not data:
                break
            request = msgspec.msgpack.decode(data, type=_ForkRequest)
            if module := remaining.pop(request.arguments[0].decode(), None):
                importlib.import_module(module)
            quiet_s = QUIET_S
            # Garbage collections in the forked processes shall not copy the memory of the modules.
            gc.freeze()
            with contextlib.suppress(OSError):
                _fork(request, fds, pids)
            for fd in fds:
                os.close(fd)
        code = 0
    finally:
        os._exit(code)


def _prepare(requests: socket.socket) -> None:
    name_process("fork server")
    os.setpgid(0, 0)
    os.closerange(3, requests.fileno())
    os.closerange(requests.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    # The caller may handle these.
    if callable(signal.getsignal(signal.SIGCHLD)):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ignore_stop_signals()
    if not sys.flags.safe_path:
        # A file in the current directory must not shadow a module.
        del sys.path[0]
    gc.disable()


def _fork(request: _ForkRequest, fds: list[int], pids: tuple[int, int]) -> None:
    """Fork a process, and send its ID once its parent has exited. `pids` is a pipe for the ID."""
    parent = os.fork()
    if not parent:
        _fork_again(request, fds, pids[1])
    _, failure = os.waitpid(parent, 0)
    if not failure:
        os.write(fds[0], os.read(pids[0], 16))


def _fork_again(request: _ForkRequest, fds: list[int], pids_fd: int) -> NoReturn:
    """Fork the process that runs the program, write its ID, and exit."""
    code = 1
    try:
        if 0 in request.fds:
            # A supervisor that starts meanwhile recognizes the process by its standard input.
            os.dup2(fds[1 + request.fds.index(0)], 0)
        if pid := os.fork():
            os.write(pids_fd, b"%d" % pid)
            code = 0
        else:
            _run_program(request, fds)
    finally:
        os._exit(code)


def _run_program(request: _ForkRequest, fds: list[int]) -> NoReturn:
    code = 1
    try:
        if not os.read(fds[0], 1):
            os._exit(ORPHANED_EXIT_CODE)
        os.setpgid(0, 0)
        _place_fds(fds[1:], request.fds)
        os.environb.clear()
        os.environb.update(request.environment)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        gc.enable()
        sys.argv = [os.fsdecode(argument) for argument in request.arguments]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            code = exit_.code or 0
        else:
            print(exit_.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit like any program, but let the system free the memory.

    Freeing each object would copy the memory that this process shares with the fork server. Python has no public calls
    for this; its `multiprocessing` uses the same.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def _place_fds(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, and close all others except standard output and error."""
    first_free = max(numbers, default=2) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, first_free) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    closed_from = 3
    for number in sorted(number for number in numbers if number >= closed_from):
        os.closerange(closed_from, number)
        closed_from = number + 1
    os.closerange(closed_from, os.sysconf("SC_OPEN_MAX"))
