"""One process of the engine, as its parent sees it."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.supervisor_messages import Heartbeat, ProcessInfo, Stage
from .local_process import Process, ProcessSpec, Role

STARTING_PATIENCE: Final = 12
"""By this factor a process may be silent for longer before it is ready: a large import can hold up all its threads."""

_REMEDY: Final = "free some, or lower --kv-cache-memory-bytes or --max-num-seqs"
_SIGKILL: Final = {
    True: f"most likely by the kernel, which has killed for want of memory since it started; {_REMEDY}",
    False: "and not by the kernel for want of memory; look for who else ends processes here",
    None: f"which is often the kernel's answer to want of memory; if it was, {_REMEDY}",
}
"""Where the signal may have come from, by whether the kernel has killed any process for want of memory meanwhile."""


class Child:
    """A process from its start to its end.

    `kill_at` is when it must be gone; `hang` says in what way it hung, if it was killed for that. It `is_known_dead`
    once the supervisor has handled its end.
    """

    def __init__(self, spec: ProcessSpec, epoch: int, process: Process) -> None:
        self.spec = spec
        self.epoch = epoch
        self.stage = Stage.STARTING
        self.detail = ""
        self.kill_at: float | None = None
        self.hang = ""
        self.is_known_dead = False
        self.last_beat = time.monotonic()
        self.ready_since: float | None = None
        self.progress = Heartbeat(spec.name, 0)
        self._steps_per_s = 0.0
        self._process = process
        self.exit_fd = process.exit_fd

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, so that it had no chance to say why."""
        code = self._process.poll()
        return code is not None and code < 0

    def enter(self, stage: Stage, detail: str) -> None:
        """It has reported a stage."""
        self.stage, self.detail = stage, detail
        self.last_beat = time.monotonic()
        if stage is Stage.READY and self.ready_since is None:
            self.ready_since = time.monotonic()

    def beat(self, heartbeat: Heartbeat) -> None:
        """It has given a sign of life."""
        now = time.monotonic()
        num_steps = heartbeat.num_steps - self.progress.num_steps
        # Heartbeats that were delayed arrive together, but were sent at least this far apart.
        self._steps_per_s = num_steps / max(now - self.last_beat, BEAT_INTERVAL_S)
        self.last_beat, self.progress = now, heartbeat

    def find_hang(self, now: float, heartbeat_timeout_s: float, step_timeout_s: float) -> str:
        """In what way it hangs; "" if it does not."""
        if not self.pid:
            return ""
        silent_s = now - self.last_beat
        if self.ready_since is None:
            heartbeat_timeout_s *= STARTING_PATIENCE
        if silent_s > heartbeat_timeout_s:
            return f"{self.spec.name} has given no sign of life for {silent_s:.1f} s"
        if self.progress.busy_s > step_timeout_s:
            return f"{self.spec.name} has been in one step for {self.progress.busy_s:.0f} s"
        return ""

    def info(self, now: float, num_restarts: int, num_dropped_frames: int) -> ProcessInfo:
        is_frontend = self.spec.role is Role.FRONTEND
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
            replica=None if is_frontend else self.spec.replica,
            num_dropped_frames=num_dropped_frames,
        )

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL to the process and what it may have started."""
        if self.alive:
            self._process.kill()

    def close(self) -> None:
        self._process.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None

    def obituary(self) -> str:
        if self.stage is Stage.FAILED:
            return f"{self.spec.name}: {self.detail}"
        if self.hang:
            return f"{self.hang}, and was killed"
        if self._process.reason:
            return f"{self.spec.name}: {self._process.reason}"
        code = self._process.poll()
        if code is None or code >= 0:
            return f"{self.spec.name} exited unexpectedly with code {code}; its messages are above"
        name = _name_of_signal(-code)
        if -code == signal.SIGKILL:
            return f"{self.spec.name} was killed by {name}, {_SIGKILL[self._process.saw_oom_kills]}"
        return f"{self.spec.name} was killed by {name}; its messages are above"


def _name_of_signal(signum: int) -> str:
    """Most real-time signals have none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
