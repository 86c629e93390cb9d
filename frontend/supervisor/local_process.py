"""A process on this machine, and the interface through which its parent controls any process."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from .guardian.link import GuardianLink

HAS_EXIT_FD = hasattr(os, "pidfd_open")
VMSTAT = Path("/proc/vmstat")

NOT_STARTED: Final = 127
"""The exit code of a process that could not be started, as shells report it."""


WAIT_S: Final = 1.0
"""Maximum seconds between two looks at a process that is exiting."""


class Role(enum.Enum):
    """The kind of a process. Only the store is optional: the others serve without it until it has restarted."""

    FRONTEND = enum.auto()
    CORE = enum.auto()
    WORKER = enum.auto()
    STORE = enum.auto()


class ProcessSpec(msgspec.Struct, frozen=True):
    """A process to start.

    Attributes:
        name: The process title, and the name in every report.
        role: The kind of the process.
        argv: The command line. The epoch is appended as the last argument.
        pass_fds: File descriptors that the process inherits.
        replica: The replica of a core or worker.
        node: The rank of another machine to run on; None for this one.
        env: Variables that are added to the environment.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    replica: int = 0
    node: int | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)


def _num_oom_kills() -> int | None:
    """Return the number of out-of-memory kills on this machine since boot, including those by control-group limits."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


class GuardedProcess:
    """A child of the guardian, which reports its exit."""

    def __init__(self, pid: int, link: GuardianLink) -> None:
        self.pid = pid
        self._link = link

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._link.exit_code(self.pid)

    def wait(self) -> int:
        """Wait until the process has exited, and return the exit code."""
        while (code := self.poll()) is None:
            self._link.wait_for_exit(WAIT_S)
        return code


class LocalProcess:
    """A process on this machine. If it could not be started, it counts as exited and `reason` says why.

    Args:
        process: The process; None if it could not be started.
        reason: The reason why it could not be started.

    Attributes:
        pid: The process ID, 0 if it does not run.
        exit_fd: A descriptor that becomes readable when the process exits; None if the system does not support this.
            The caller closes it.
        reason: The reason why the process does not run, if more is known than its exit code.
    """

    def __init__(
        self, process: GuardedProcess | subprocess.Popen[bytes] | None, reason: str = ""
    ) -> None:
        self.reason = reason
        self.pid = 0 if process is None else process.pid
        # The guardian reports the exits of its children, so their descriptors are not needed.
        self.exit_fd: int | None = None
        self._oom_kills_before = _num_oom_kills()
        self._process = process
        if isinstance(process, subprocess.Popen) and HAS_EXIT_FD:
            try:
                self.exit_fd = os.pidfd_open(self.pid)
            except OSError as error:
                self.reason = f"cannot watch the process: {error.strerror}"
                self.kill()

    @property
    def saw_oom_kills(self) -> bool | None:
        """True if the kernel's out-of-memory killer was active since the process started; None if unknown."""
        if self._oom_kills_before is None:
            return None
        return _num_oom_kills() != self._oom_kills_before

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return NOT_STARTED if self._process is None else self._process.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process has exited and release its resources."""
        if self._process is not None:
            self._process.wait()


class MachineWait:
    """The wait of one process for a processor, or for the kernel to read or write a disk, since `restart`.

    On a machine with too much work, a thread that holds Python's interpreter lock may wait for seconds, and no other
    thread of the process can send a heartbeat meanwhile. So the thread that waited longest counts.
    """

    def __init__(self) -> None:
        self._began_ns = 0
        self._before: dict[str, _ThreadTimes] | None = None

    def restart(self) -> None:
        """Begin again, because a heartbeat of the process arrived."""
        self._before = None

    def measure(self, pid: int) -> float:
        """Return the seconds since the first call after `restart`; 0 if the system does not report it."""
        now_ns, now = time.monotonic_ns(), _read_thread_times(pid)
        if self._before is None:
            self._began_ns, self._before = now_ns, now
        waits_ns = [0]
        for thread, times in now.items():
            before = self._before.get(thread, _NEW_THREAD)
            waits_ns.append(times.waited_ns - before.waited_ns)
            if times.may_wait and before is not _NEW_THREAD:
                # The kernel adds a wait for a processor when it ends, and does not add up waits for disks.
                waits_ns.append(now_ns - self._began_ns - (times.ran_ns - before.ran_ns))
        return max(waits_ns) / 1e9


class _ThreadTimes(NamedTuple):
    """The nanoseconds that a thread has run, and has waited for a processor.

    `may_wait` is true if it now runs, waits for a processor (state R), or is in the kernel without a way to interrupt
    it, as while a disk is read (state D).
    """

    ran_ns: int
    waited_ns: int
    may_wait: bool


_NEW_THREAD: Final = _ThreadTimes(0, 0, False)


def _read_thread_times(pid: int) -> dict[str, _ThreadTimes]:
    """Return the times of each thread of a process since it started."""
    found: dict[str, _ThreadTimes] = {}
    # The kernel may have no such statistics, and threads end at any time.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                found[thread.name] = _ThreadTimes(ran_ns, waited_ns, state in "RD")
    return found
