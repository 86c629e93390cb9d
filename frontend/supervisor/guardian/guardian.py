"""The guardian: the process that the user starts, and the parent of the supervisor.

The guardian only waits, so hardly anything but SIGKILL can end it. If the supervisor crashes, is killed or hangs, the
guardian forks another one, which adopts the processes of the engine. Requests do not notice. If the guardian itself
exits, the lifeline closes, and every process exits, the supervisor included. So nothing is left behind.

A process whose parent has exited becomes a child of the guardian. The fork servers make all processes of the engine
such children, so that every supervisor can watch them: the guardian reaps them and reports their exit codes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from ....protocol.errors import EngineError
from ....protocol.process import send_when_parent_exits
from .fork_server import MODULES, ForkServer
from .heartbeat import SupervisorHeartbeat
from .lifeline import Lifeline
from .link import NO_PROCESS, GuardianLink, Notice

FAULT: Final = 70
"""Exit code of a supervisor with an unexpected error, after which another supervisor continues."""

STABLE_S: Final = 2.0
"""A supervisor that ran for this many seconds does not count as a failed start."""

MAX_FAILED_STARTS: Final = 5

LOOKS_PER_TIMEOUT: Final = 5
"""Number of looks for a heartbeat after which the guardian concludes that the supervisor hangs."""

MAX_REMEMBERED_EXITS: Final = 1000
"""Maximum exits of processes that are kept for the next supervisor."""

_PR_SET_CHILD_SUBREAPER: Final = 36


class GuardianFailed(EngineError):
    """The engine cannot continue, because its supervisor cannot."""


def become_subreaper() -> bool:
    """Make this process the next parent of processes whose parent exits. Return False if the system cannot do this."""
    is_possible = sys.platform == "linux" and os.path.isdir("/proc/self/fd")
    return is_possible and bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Guardian:
    """Runs a supervisor in a child process, and another one if it crashes. Call `become_subreaper` first.

    Args:
        signals_fd: A descriptor that is readable when a stop signal was received.
        take_signal: Returns the number of such a signal, or 0. The signals are forwarded to the supervisor.
        on_notice: Notice of the supervisor -> the function to call when it is first received.
        on_crash: Receives a line about each crash or hang of the supervisor.
        heartbeat_timeout_s: A supervisor without a heartbeat for this many seconds hangs, and is killed. Time in which
            this process was suspended does not count.
        fork_servers: Program of the engine -> the fork server of its processes. One that exits is replaced; the
            supervisor learns of another one once that has imported its modules.
    """

    def __init__(
        self,
        signals_fd: int,
        take_signal: Callable[[], int],
        on_notice: Mapping[Notice, Callable[[], None]],
        on_crash: Callable[[str], None],
        heartbeat_timeout_s: float,
        fork_servers: dict[str, ForkServer],
    ) -> None:
        self._signals_fd, self._take_signal = signals_fd, take_signal
        self._on_notice = dict(on_notice)
        self._on_crash = on_crash
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._fork_servers = fork_servers
        self._loading: list[ForkServer] = []
        self._heartbeat = SupervisorHeartbeat()
        self._lifeline = Lifeline()
        self._exits: deque[tuple[int, int]] = deque(maxlen=MAX_REMEMBERED_EXITS)
        self._is_first = True
        """True until a supervisor has run."""
        self._was_ready = False
        self._is_stopping = False

    def run(self, supervise: Callable[[GuardianLink], int]) -> int:
        """Call `supervise` in a child process, again after each crash, and return its result.

        Raises:
            GuardianFailed: The supervisor crashed while the engine was stopping, or crashes again and again.
        """
        woken_fd, wake_fd = os.pipe()
        os.set_blocking(woken_fd, False)
        os.set_blocking(wake_fd, False)
        previous = signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        num_failed_starts = 0
        try:
            while True:
                started = time.monotonic()
                code, is_hung = self._run_once(supervise, woken_fd)
                if code >= 0 and code != FAULT:
                    return code
                how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
                if is_hung:
                    how = f"sent no heartbeat for {self._heartbeat_timeout_s:g} s, and was killed"
                is_failed_start = time.monotonic() - started < STABLE_S
                num_failed_starts = num_failed_starts + 1 if is_failed_start else 0
                if self._is_stopping or num_failed_starts >= MAX_FAILED_STARTS:
                    raise GuardianFailed(f"the supervisor {how}; stopping the server")
                self._on_crash(f"the supervisor {how}; starting another one")
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, previous)
            self._lifeline.close()
            os.close(woken_fd)
            os.close(wake_fd)

    def _run_once(
        self, supervise: Callable[[GuardianLink], int], woken_fd: int
    ) -> tuple[int, bool]:
        """Run one supervisor until it exits. Return its exit code, negative for a signal, and whether it hung."""
        self._heartbeat.restart()
        channel, child_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guardian = os.getpid()
        pid = os.fork()
        if not pid:
            channel.close()
            self._lifeline.leave_to_parent()
            _begin_child(guardian)
            link = GuardianLink(
                child_channel,
                self._lifeline,
                self._heartbeat,
                is_first=self._is_first,
                was_ready=self._was_ready,
                fork_servers=self._fork_servers,
            )
            _run_child(supervise, link)
        self._is_first = False
        child_channel.close()
        channel.setblocking(False)
        with channel:
            for exit_ in self._exits:
                _report(channel, exit_)
            look_s = self._heartbeat_timeout_s / LOOKS_PER_TIMEOUT
            next_look = time.monotonic() + look_s
            num_silent_looks = 0
            while True:
                remaining_s = max(next_look - time.monotonic(), 0.0)
                loading = [server.socket.fileno() for server in self._loading]
                sources = [self._signals_fd, woken_fd, channel.fileno(), *loading]
                if select.select(sources, [], [], remaining_s)[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken_fd, 4096)
                    code = self._reap(pid, channel)
                    self._read_notices(channel)
                    if code is not None:
                        return code, num_silent_looks >= LOOKS_PER_TIMEOUT
                    self._add_fork_servers(channel)
                    self._forward_signals(channel)
                if time.monotonic() < next_look:
                    continue
                # Silence is counted in looks, so time in which this process was suspended does not count.
                next_look = time.monotonic() + look_s
                num_silent_looks = 0 if self._heartbeat.was_sent() else num_silent_looks + 1
                if num_silent_looks >= LOOKS_PER_TIMEOUT:
                    os.kill(pid, signal.SIGKILL)

    def _reap(self, supervisor: int, channel: socket.socket) -> int | None:
        """Wait for all children that have exited. Return the exit code of the supervisor if it is one of them."""
        supervisor_code = None
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return supervisor_code
            code = os.waitstatus_to_exitcode(status)
            if pid == supervisor:
                # No other child can be found afterwards, if there is none: then waitpid would raise.
                supervisor_code = code
                if not _has_children():
                    return code
            else:
                self._exits.append((pid, code))
                _report(channel, (pid, code))
                self._replace_fork_server(pid)

    def _replace_fork_server(self, pid: int) -> None:
        """Start another fork server if `pid` was one. One that exits while it loads is not replaced."""
        for server in {each for each in self._fork_servers.values() if each.pid == pid}:
            server.close()
            for program in server.modules:
                del self._fork_servers[program]
            if not self._is_stopping:
                with contextlib.suppress(OSError):
                    self._loading.append(ForkServer.start(server.modules))

    def _add_fork_servers(self, channel: socket.socket) -> None:
        """Give the supervisor the fork servers that have imported their modules."""
        readable, _, _ = select.select([server.socket for server in self._loading], [], [], 0)
        for server in [each for each in self._loading if each.socket in readable]:
            self._loading.remove(server)
            if not server.socket.recv(1):
                server.close()
                continue
            self._fork_servers |= dict.fromkeys(server.modules, server)
            message = b"%d %d" % (server.pid, MODULES.index(dict(server.modules)))
            with contextlib.suppress(OSError):
                socket.send_fds(channel, [message], [server.socket.fileno()])

    def _read_notices(self, channel: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while message := channel.recv(1):
                notice = Notice(message)
                self._was_ready |= notice is Notice.READY
                self._on_notice.pop(notice, lambda: None)()

    def _forward_signals(self, channel: socket.socket) -> None:
        if signum := self._take_signal():
            self._is_stopping = True
            _report(channel, (NO_PROCESS, signum))


def _report(channel: socket.socket, exit_: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        channel.send(b"%d %d" % exit_)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _begin_child(guardian: int) -> None:
    """Prepare this forked process to be the supervisor of `guardian`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ctrl-C at the terminal reaches only the guardian, which forwards it.
    os.setpgid(0, 0)
    is_tied = send_when_parent_exits(signal.SIGKILL)
    if not is_tied or os.getppid() != guardian:
        os._exit(FAULT)


def _run_child(supervise: Callable[[GuardianLink], int], link: GuardianLink) -> NoReturn:
    code = FAULT
    try:
        code = supervise(link)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
