"""Start the processes of an engine, on this machine and on others, or adopt those that are running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from .guardian.lifeline import Lifeline
from .guardian.link import GuardianLink
from .local_process import GuardedProcess, LocalProcess, ProcessSpec
from .nodes import Nodes, Process


class Launcher:
    """Starts processes, and ties their life to that of one process with a `Lifeline`.

    Args:
        link: The connection to the guardian; None if this process has none. Then this process holds the lifeline.

    Attributes:
        nodes: The other machines, if any.
        link: The connection to the guardian, if any.
    """

    def __init__(self, link: GuardianLink | None = None) -> None:
        self.nodes: Nodes | None = None
        self.link = link
        self._lifeline = Lifeline() if link is None else link.lifeline
        self._orphans = set() if link is None else link.find_orphans()

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid messages from other machines."""
        return 0 if self.nodes is None else self.nodes.num_dropped_frames

    def beat(self) -> None:
        """Show the guardian, if any, that this process does not hang."""
        if self.link is not None:
            self.link.heartbeat.send()

    def read_exits(self) -> None:
        """Read what the guardian, if any, has reported. Else its connection would end every wait immediately."""
        if self.link is not None:
            self.link.read_exits()

    def take_forwarded_signals(self) -> list[int]:
        """Return the stop signals that the guardian, if any, has forwarded since the last call."""
        return [] if self.link is None else self.link.take_forwarded_signals()

    def end_beats(self) -> None:
        """Send no more heartbeats: this process only waits for processes that it has killed."""
        if self.link is not None:
            self.link.heartbeat.end()

    def launch(self, spec: ProcessSpec, epoch: int) -> Process:
        """Start a process in an epoch."""
        # The start of many processes can take seconds on a slow file system.
        self.beat()
        if spec.node is None or self.nodes is None:
            return self._start(spec, epoch)
        return self.nodes.launch(spec, epoch)

    def _start(self, spec: ProcessSpec, epoch: int) -> LocalProcess:
        argv = (*spec.argv, str(epoch))
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.env}
        process: GuardedProcess | subprocess.Popen[bytes] | None = self._fork(spec, argv, env)
        reason = ""
        if process is None:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=self._lifeline.fd,
                    pass_fds=spec.pass_fds,
                    # The process gets its own process group, so that Ctrl-C at the terminal reaches only the
                    # supervisor.
                    process_group=0,
                    env=env,
                )
            except OSError as error:
                reason = f"cannot start {argv[0]}: {error.strerror}"
        return LocalProcess(process, reason)

    def _fork(
        self, spec: ProcessSpec, argv: Sequence[str], env: Mapping[str, str]
    ) -> GuardedProcess | None:
        """Return a process that a fork server has forked; None without a fork server, or if it has exited."""
        if self.link is None:
            return None
        # An exit that is known before the fork was of an earlier process, which may have had the same process ID. A
        # fork server that was lost may have been replaced.
        self.link.read_exits()
        program, *arguments = argv[argv.index("-m") + 1 :]
        server = self.link.fork_servers.get(program)
        if server is None:
            return None
        fds = {fd: fd for fd in spec.pass_fds} | {0: self._lifeline.fd}
        try:
            pid = server.fork((program, *arguments), env, fds, self.beat)
        except OSError:
            del self.link.fork_servers[program]
            return None
        self.link.discard_exit(pid)
        return GuardedProcess(pid, self.link)

    def adopt(self, pid: int) -> LocalProcess:
        """Return a process that an earlier supervisor has started."""
        assert self.link is not None
        if pid not in self._orphans:
            # The earlier supervisor has received its exit code.
            self.link.record_exit(pid, -signal.SIGKILL)
        return LocalProcess(GuardedProcess(pid, self.link))

    def kill_unknown(self, known: Iterable[int]) -> None:
        """Kill the processes that an earlier supervisor has started but not saved."""
        for pid in self._orphans.difference(known):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the lifeline. Processes that still run exit."""
        self._lifeline.close()
