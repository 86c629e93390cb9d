"""The state of one child process of the supervisor."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from ...protocol.errors import PeerLostError
from ...protocol.heartbeat import BEAT_INTERVAL_S
from ...protocol.supervisor_messages import Heartbeat, ProcessInfo, Stage
from .local_process import MachineWait, ProcessSpec, Role
from .nodes import Process
from .saved_state import SavedProcess

STARTING_PATIENCE: Final = 12
"""Factor on the heartbeat timeout until a process is ready, because a large import can block all of its threads."""

MAX_WAIT: Final = 4
"""Maximum wait for a processor or a disk that is not counted as silence, as a factor on the heartbeat timeout."""

_STARTING_STAGES: Final = frozenset({Stage.STARTING, Stage.LOADING, Stage.WARMING})
"""The stages before a process is ready."""

_REMEDY: Final = "free memory, or lower --kv-cache-memory-bytes or --max-num-seqs"
_SIGKILL: Final = {
    True: f"probably by the kernel's out-of-memory killer, which was active; {_REMEDY}",
    False: "but not by the kernel's out-of-memory killer; check which other program kills processes on this machine",
    None: f"possibly by the kernel's out-of-memory killer; if so, {_REMEDY}",
}
"""Explanation of SIGKILL, by whether the out-of-memory killer ran since the process started (None: unknown)."""


_FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
"""Signals that a process receives because of a fault in its own code."""


class Child:
    """One process from start to exit.

    Attributes:
        kill_at: The time at which the process is killed if it still runs (CLOCK_MONOTONIC seconds); None for never.
        hang: A description of the hang for which the process was killed; otherwise empty.
        is_known_dead: True if the supervisor has handled the exit of the process.
        awaits_cause_until: Until when the exit is left unhandled, because the exit of another process may be the cause
            (CLOCK_MONOTONIC seconds); 0.0 if nothing has to wait.
    """

    def __init__(self, spec: ProcessSpec, epoch: int, process: Process) -> None:
        self.spec = spec
        self.epoch = epoch
        self.stage = Stage.STARTING
        self.detail = ""
        self.kill_at: float | None = None
        self.hang = ""
        self.is_known_dead = False
        self.awaits_cause_until = 0.0
        self.last_beat = time.monotonic()
        self.ready_since: float | None = None
        self.progress = Heartbeat(spec.name, 0)
        self._steps_per_s = 0.0
        self._machine_wait = MachineWait()
        self._process = process
        self.exit_fd = process.exit_fd

    @property
    def pid(self) -> int:
        """The process ID; 0 until the process runs."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process has not exited."""
        return self._process.poll() is None

    @property
    def has_crashed(self) -> bool:
        """True if the process exited through a fault in its own code, or hung and was killed."""
        code = self._process.poll()
        return bool(self.hang) or (code is not None and -code in _FAULTS)

    @property
    def was_killed(self) -> bool:
        """True if a signal ended the process, so that it could not report a final error."""
        code = self._process.poll()
        return code is not None and code < 0

    @property
    def has_lost_peer(self) -> bool:
        """True if the process reported that it exited because another process did."""
        return self._process.poll() == PeerLostError.exit_code

    @property
    def may_have_lost_peer(self) -> bool:
        """True if the process may have exited because another one did: it reported an error, or gloo aborted it."""
        return self.has_lost_peer or self._process.poll() == -signal.SIGABRT

    def enter_stage(self, stage: Stage, detail: str) -> None:
        """Record a stage that the process reported."""
        self.last_beat = time.monotonic()
        if self.ready_since is not None and stage in _STARTING_STAGES:
            # A heartbeat arrived before this report. The process would count as not ready until its next report.
            return
        self.stage, self.detail = stage, detail
        if stage is Stage.READY and self.ready_since is None:
            self.ready_since = time.monotonic()

    def beat(self, heartbeat: Heartbeat, at: float) -> None:
        """Record a heartbeat of the time `at` (CLOCK_MONOTONIC seconds)."""
        num_steps = heartbeat.num_steps - self.progress.num_steps
        # Delayed heartbeats can arrive together, although they were sent at least one interval apart.
        self._steps_per_s = num_steps / max(at - self.last_beat, BEAT_INTERVAL_S)
        self.last_beat, self.progress = at, heartbeat
        if heartbeat.is_ready and self.ready_since is None:
            # The supervisor that received the report of this stage has crashed.
            self.enter_stage(Stage.READY, "")

    def save(self) -> SavedProcess:
        """Return what another supervisor needs to adopt the process."""
        return SavedProcess(self.spec.name, self.pid, self.epoch, self.stage, self.detail)

    def find_hang(self, now: float, heartbeat_timeout_s: float, step_timeout_s: float) -> str:
        """Return a description of how the process hangs; "" if it does not hang."""
        if not self.pid:
            return ""
        silent_s = now - self.last_beat
        if self.ready_since is None:
            heartbeat_timeout_s *= STARTING_PATIENCE
        if silent_s < heartbeat_timeout_s / 2:
            self._machine_wait.restart()
        elif self.spec.node is None:
            waited_s = self._machine_wait.measure(self.pid)
            heartbeat_timeout_s += min(waited_s, MAX_WAIT * heartbeat_timeout_s)
        if silent_s > heartbeat_timeout_s:
            return f"{self.spec.name} sent no heartbeat for {silent_s:.1f} s"
        if self.progress.busy_s > step_timeout_s:
            return f"{self.spec.name} spent {self.progress.busy_s:.0f} s in one step"
        return ""

    def process_info(self, now: float, num_restarts: int, num_dropped_frames: int) -> ProcessInfo:
        """Return the state of the process for status reports. `now` is in CLOCK_MONOTONIC seconds."""
        is_of_replica = self.spec.role in (Role.CORE, Role.WORKER)
        return ProcessInfo(
            name=self.spec.name,
            pid=self.pid,
            stage=self.stage if self.alive else Stage.STOPPED,
            detail=self._process.reason or self.detail,
            epoch=self.epoch,
            num_restarts=num_restarts,
            silent_s=now - self.last_beat,
            busy_s=self.progress.busy_s,
            steps_per_s=self._steps_per_s,
            num_running=self.progress.num_running,
            num_waiting=self.progress.num_waiting,
            kv_cache_usage=self.progress.kv_cache_usage,
            replica=self.spec.replica if is_of_replica else None,
            num_dropped_frames=num_dropped_frames,
        )

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.alive:
            self._process.kill()

    def close(self) -> None:
        """Release the resources of a process that has exited or was killed."""
        self._process.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None

    def exit_summary(self) -> str:
        """Return one line that says how and why the process exited."""
        if self.stage is Stage.FAILED:
            return f"{self.spec.name}: {self.detail}"
        if self.hang:
            return f"{self.hang}, and was killed"
        if self._process.reason:
            return f"{self.spec.name}: {self._process.reason}"
        code = self._process.poll()
        if code is None or code >= 0:
            return f"{self.spec.name} exited unexpectedly with code {code}; see its messages above"
        name = _name_of_signal(-code)
        if -code == signal.SIGKILL:
            return f"{self.spec.name} was killed by {name}, {_SIGKILL[self._process.saw_oom_kills]}"
        return f"{self.spec.name} was killed by {name}; see its messages above"


def _name_of_signal(signum: int) -> str:
    """Return the name of a signal, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
