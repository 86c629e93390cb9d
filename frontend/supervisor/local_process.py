"""A process on this machine, and the interface through which its parent controls any process."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from ...protocol.process import EPOCH_FD
from ..guardian.lifeline import Lifeline
from ..guardian.link import GuardianLink

HAS_EXIT_FD = hasattr(os, "pidfd_open")
VMSTAT = Path("/proc/vmstat")

NOT_STARTED: Final = 127
"""The exit code of a process that could not be started, as shells report it."""


WAIT_S: Final = 1.0
"""Maximum seconds between two looks at a process that is exiting."""


class Role(enum.Enum):
    """The kind of a process. The other processes can serve without the store for a while."""

    FRONTEND = enum.auto()
    CORE = enum.auto()
    WORKER = enum.auto()
    STORE = enum.auto()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start.

    Attributes:
        name: The process title, and the name in every report.
        role: The kind of the process.
        argv: The command line. The epoch is appended as the last argument.
        pass_fds: File descriptors that the process inherits.
        replica: The replica of a core or worker.
        node: The rank of another machine to run on; None for this one.
        env: Variables that are added to the environment.
        can_wait: Whether the process may be started before it is needed, and receive its epoch later.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    replica: int = 0
    node: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    can_wait: bool = False


class Process(Protocol):
    """A process that was started, on this machine or another.

    Attributes:
        pid: The process ID, 0 until it runs.
        exit_fd: A descriptor that becomes readable when the process exits; None if the system does not support this.
            The caller closes it.
        reason: Why the process does not run, if more is known than its exit code.
    """

    pid: int
    exit_fd: int | None
    reason: str

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""

    @property
    def saw_oom_kills(self) -> bool | None:
        """True if the kernel's out-of-memory killer was active since the process started; None if unknown."""

    def close(self) -> None:
        """Release the resources of a process that has exited or was killed."""


def _num_oom_kills() -> int | None:
    """Return the number of out-of-memory kills on this machine since boot, including those by control-group limits."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


class LocalProcess:
    """A child process. If it cannot be started, it counts as exited immediately and `reason` says why."""

    def __init__(self, spec: ProcessSpec, epoch: int | None, lifeline: Lifeline) -> None:
        """Start the process. If `epoch` is None, the process waits for `begin`."""
        self.pid = 0
        self.exit_fd: int | None = None
        self.reason = ""
        self._oom_kills_before = _num_oom_kills()
        self._popen: subprocess.Popen[bytes] | None = None
        self._epoch_writer: int | None = None
        epoch_reader, inherited = None, spec.pass_fds
        if epoch is None:
            epoch_reader, self._epoch_writer = os.pipe()
            inherited = (*inherited, epoch_reader)
        last = f"{EPOCH_FD}{epoch_reader}" if epoch is None else str(epoch)
        try:
            self._popen = subprocess.Popen(
                (*spec.argv, last),
                stdin=lifeline.fd,
                pass_fds=inherited,
                # The process gets its own process group, so that Ctrl-C at the terminal reaches only the supervisor.
                process_group=0,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            )
            self.pid = self._popen.pid
            self.exit_fd = os.pidfd_open(self.pid) if HAS_EXIT_FD else None
        except OSError as error:
            self.reason = f"cannot start {spec.argv[0]}: {error.strerror}"
            self.kill()
        finally:
            if epoch_reader is not None:
                os.close(epoch_reader)

    @property
    def saw_oom_kills(self) -> bool | None:
        """True if the kernel's out-of-memory killer was active since the process started; None if unknown."""
        if self._oom_kills_before is None:
            return None
        return _num_oom_kills() != self._oom_kills_before

    def begin(self, epoch: int) -> bool:
        """Send the epoch to a waiting process. Return False if the process has exited."""
        if self._popen is None or self._epoch_writer is None:
            return False
        # A waiting process sends no heartbeats, so the supervisor cannot notice that it is stopped; continue it in any
        # case.
        self.send_signal(signal.SIGCONT)
        try:
            os.write(self._epoch_writer, b"%d\n" % epoch)
        except BrokenPipeError:
            return False
        return True

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return NOT_STARTED if self._popen is None else self._popen.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        if self._popen is not None:
            self._popen.send_signal(signum)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self._popen is not None and self._popen.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._popen.kill()

    def close(self) -> None:
        """Wait until the process has exited and release its resources."""
        if self._popen is not None:
            self._popen.wait()
        if self._epoch_writer is not None:
            os.close(self._epoch_writer)
            self._epoch_writer = None


class AdoptedProcess:
    """A process that an earlier supervisor has started. The guardian reports its exit."""

    def __init__(self, pid: int, link: GuardianLink, *, is_running: bool) -> None:
        self.pid = pid
        self.exit_fd: int | None = None
        self.reason = ""
        self._link = link
        self._was_running = is_running
        self._oom_kills_before = _num_oom_kills()

    @property
    def saw_oom_kills(self) -> bool | None:
        """True if the kernel's out-of-memory killer was active since the adoption; None if unknown."""
        if self._oom_kills_before is None:
            return None
        return _num_oom_kills() != self._oom_kills_before

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        code = self._link.exit_code(self.pid)
        if code is None and not self._was_running:
            # The earlier supervisor has received its exit code.
            return -signal.SIGKILL
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process has exited."""
        while self.poll() is None:
            self._link.wait_for_exit(WAIT_S)
