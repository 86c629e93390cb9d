"""A process of this machine, and what its parent needs of any process."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

HAS_EXIT_FD = hasattr(os, "pidfd_open")
VMSTAT = Path("/proc/vmstat")

NOT_STARTED: Final = 127
"""The exit code of what could not be started, as a shell gives it."""


class Role(enum.Enum):
    FRONTEND = enum.auto()
    CORE = enum.auto()
    WORKER = enum.auto()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process. `name` is its title and its name in every report.

    The epoch is added to `argv` as the last argument. Cores and workers belong to a `replica`. A `node` other than None
    is another machine; `env` is added to the environment. A process that `can_wait` may be started without an epoch,
    before it is needed, and is told it later.
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
    """A process that was started, here or elsewhere.

    `pid` is 0 until it runs. `exit_fd` becomes readable at its end, and is None where the system has no such thing; the
    caller closes it. `reason` says why it does not run, if more is known than its exit code. `saw_oom_kills` is whether
    the kernel has killed any process for want of memory since this one started, None if the kernel does not tell.
    """

    pid: int
    exit_fd: int | None
    reason: str

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def send_signal(self, signum: signal.Signals) -> None: ...

    def kill(self) -> None:
        """SIGKILL to the process and what it may have started."""

    @property
    def saw_oom_kills(self) -> bool | None: ...

    def close(self) -> None:
        """Forget it; it has ended or was killed."""


def _num_oom_kills() -> int | None:
    """Of the whole machine since it booted, those that enforce the limit of a control group included."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


class LocalProcess:
    """If the system refuses to start the process it counts as ended at once, and `reason` says why."""

    def __init__(self, spec: ProcessSpec, epoch: int | None) -> None:
        """Without an epoch it waits until it must `begin`."""
        argv = spec.argv if epoch is None else (*spec.argv, str(epoch))
        self.pid = 0
        self.exit_fd: int | None = None
        self.reason = ""
        self._oom_kills_before = _num_oom_kills()
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=spec.pass_fds,
                # A group of its own: Ctrl-C at the terminal reaches the supervisor alone.
                process_group=0,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            )
            self.pid = self._popen.pid
            self.exit_fd = os.pidfd_open(self.pid) if HAS_EXIT_FD else None
        except OSError as error:
            self.reason = f"cannot start {spec.argv[0]}: {error.strerror}"
            self.kill()

    @property
    def saw_oom_kills(self) -> bool | None:
        if self._oom_kills_before is None:
            return None
        return _num_oom_kills() != self._oom_kills_before

    def begin(self, epoch: int) -> bool:
        """Let a process that waits begin. False if it is gone."""
        if self._popen is None:
            return False
        assert self._popen.stdin is not None
        # It may have been stopped while it waited, which is not watched for.
        self.send_signal(signal.SIGCONT)
        try:
            self._popen.stdin.write(b"%d\n" % epoch)
        except BrokenPipeError:
            return False
        return True

    def poll(self) -> int | None:
        return NOT_STARTED if self._popen is None else self._popen.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        if self._popen is not None:
            self._popen.send_signal(signum)

    def kill(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._popen.kill()

    def close(self) -> None:
        if self._popen is None:
            return
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
