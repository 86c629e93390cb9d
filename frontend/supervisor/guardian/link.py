"""The supervisor's connection to its guardian."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
from typing import Final

from .fork_server import MODULES, ForkServer
from .heartbeat import SupervisorHeartbeat
from .lifeline import Lifeline

NO_PROCESS: Final = 0
"""The process ID in a message of the guardian whose number is a stop signal."""


class Notice(enum.Enum):
    """The notices that a supervisor sends to its guardian. The values are sent.

    Attributes:
        READY: The engine is ready.
        HANDED_OVER: Another engine accepts the connections of the listening socket.
        NOT_LISTENING: The engine accepts no more connections.
    """

    READY = b"r"
    HANDED_OVER = b"h"
    NOT_LISTENING = b"n"


class GuardianLink:
    """The connection of one supervisor to its guardian.

    Args:
        channel: Receives the exits of processes, and sends notices.
        lifeline: The pipe whose writing end the guardian holds.
        heartbeat: The heartbeat that the guardian expects. Send it at least every second, except while waiting for
            processes that were killed.
        is_first: True if this guardian has had no earlier supervisor.
        was_ready: True if an earlier supervisor of this guardian has reported that the engine is ready.
        fork_servers: Program -> the fork server that forks it as a child of the guardian. Lost ones are removed.
            `read_exits` adds those that replace them.
    """

    def __init__(
        self,
        channel: socket.socket,
        lifeline: Lifeline,
        heartbeat: SupervisorHeartbeat,
        *,
        is_first: bool,
        was_ready: bool,
        fork_servers: dict[str, ForkServer],
    ) -> None:
        self.lifeline = lifeline
        self.heartbeat = heartbeat
        self.was_ready = was_ready
        self._is_first = is_first
        self.fork_servers = fork_servers
        self._channel = channel
        self._channel.setblocking(False)
        self._exit_codes: dict[int, int] = {}
        self._forwarded_signals: list[int] = []

    @property
    def fd(self) -> int:
        """Readable until `read_exits` if a child of the guardian has exited."""
        return self._channel.fileno()

    def send(self, notice: Notice) -> None:
        """Report something to the guardian."""
        self._channel.send(notice.value)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a child of the guardian; None if no exit of it has been read."""
        return self._exit_codes.get(pid)

    def read_exits(self) -> None:
        """Read the exits, fork servers and stop signals that the guardian has reported."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, fds, _, _ = socket.recv_fds(self._channel, 64, 1, socket.MSG_CMSG_CLOEXEC)
                if not message:
                    return
                pid, number = map(int, message.split())
                if fds:
                    server = ForkServer(MODULES[number], pid, socket.socket(fileno=fds[0]))
                    self.fork_servers |= dict.fromkeys(server.modules, server)
                elif pid == NO_PROCESS:
                    self._forwarded_signals.append(number)
                else:
                    self._exit_codes[pid] = number

    def take_forwarded_signals(self) -> list[int]:
        """Return the stop signals of the guardian that were read since the last call."""
        taken, self._forwarded_signals = self._forwarded_signals, []
        return taken

    def record_exit(self, pid: int, code: int) -> None:
        """Record an exit that the guardian has not reported to this supervisor."""
        self._exit_codes.setdefault(pid, code)

    def discard_exit(self, pid: int) -> None:
        """Discard the recorded exit of an earlier process that had the ID of a new one."""
        self._exit_codes.pop(pid, None)

    def wait_for_exit(self, timeout_s: float) -> None:
        """Wait until another process has exited, at most `timeout_s` seconds, and read its exit."""
        select.select([self._channel], [], [], timeout_s)
        self.read_exits()

    def find_orphans(self) -> set[int]:
        """Return the processes of the engine that earlier supervisors have started.

        They are those children of the guardian whose standard input is the lifeline. The guardian may have other
        children, because it is the first process of many containers.
        """
        orphans: set[int] = set()
        if self._is_first:
            # Reading the status of all processes of the machine takes 20 µs for each.
            return orphans
        lifeline = os.fstat(self.lifeline.fd)
        for name in os.listdir("/proc"):
            # A process may exit at any moment.
            with contextlib.suppress(OSError, ValueError):
                is_child = int(_fields_of(int(name))[1]) == os.getppid()
                if is_child and os.path.samestat(os.stat(f"/proc/{name}/fd/0"), lifeline):
                    orphans.add(int(name))
        return orphans - {os.getpid()}


def _fields_of(pid: int) -> list[str]:
    """Return the fields of a process's status after its name: its state, its parent and so on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
