"""Start the processes of an engine, on this machine and on others, or adopt those that are running."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

from ..guardian.lifeline import Lifeline
from ..guardian.link import GuardianLink
from .local_process import AdoptedProcess, LocalProcess, Process, ProcessSpec
from .nodes import Nodes


class Launcher:
    """Starts processes, and ties their life to that of one process with a `Lifeline`.

    Attributes:
        nodes: The other machines, if any.
        link: The connection to the guardian; None if this process has none. Then this process holds the lifeline.
    """

    def __init__(self, link: GuardianLink | None = None) -> None:
        self.nodes: Nodes | None = None
        self.link = link
        self._lifeline = Lifeline() if link is None else link.lifeline
        self._orphans = set() if link is None else link.find_orphans()

    def beat(self) -> None:
        """Show the guardian, if any, that this process does not hang."""
        if self.link is not None:
            self.link.heartbeat.send()

    def read_exits(self) -> None:
        """Read what the guardian, if any, has reported. Else its connection would end every wait immediately."""
        if self.link is not None:
            self.link.read_exits()

    def end_beats(self) -> None:
        """Send no more heartbeats: this process only waits for processes that it has killed."""
        if self.link is not None:
            self.link.heartbeat.end()

    def launch(self, spec: ProcessSpec, epoch: int) -> Process:
        """Start a process in an epoch."""
        # The start of many processes can take seconds on a slow file system.
        self.beat()
        if spec.node is None or self.nodes is None:
            return LocalProcess(spec, epoch, self._lifeline)
        return self.nodes.launch(spec, epoch)

    def launch_spare(self, spec: ProcessSpec) -> LocalProcess:
        """Start a process that waits for its epoch."""
        return LocalProcess(spec, None, self._lifeline)

    def adopt(self, pid: int) -> Process:
        """Return a process that an earlier supervisor has started."""
        assert self.link is not None
        return AdoptedProcess(pid, self.link, is_running=pid in self._orphans)

    def kill_unknown(self, known: Iterable[int]) -> None:
        """Kill the processes that an earlier supervisor has started but not saved."""
        for pid in self._orphans.difference(known):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the lifeline. Processes that still run exit."""
        self._lifeline.close()
