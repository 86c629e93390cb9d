"""The parent of every process of an engine: starts, watches, drains and ends them.

It holds a pipe to each child's standard input. Whatever happens to the supervisor, the pipe closes and
the child goes; so nothing outlives it, not even after SIGKILL.
"""

from __future__ import annotations

import enum
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import zmq

from ..protocol.config import EngineConfig
from ..protocol.errors import ConfigError, EngineError
from ..protocol.messages import ProcessStatus, Stage
from ..protocol.transport import StatusReceiver
from .stop_signals import StopSignals

HAS_EXIT_FD = hasattr(os, "pidfd_open")
WATCH_INTERVAL_S = 0.1
"""How often children are looked at where the system cannot announce their end."""

LAST_WORDS_S = 0.3
"""A process that dies may have said why; its message can arrive after its end is seen."""

DRAIN_GRACE_S = 5.0
"""What a frontend may take beyond the shutdown timeout, and cores and workers altogether."""


class ProcessFailed(EngineError):
    """A process reported a failure or died; the message is fit to be the last line."""


class Role(enum.Enum):
    FRONTEND = enum.auto()
    CORE = enum.auto()
    WORKER = enum.auto()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process. `name` is its title and its name in every `ProcessStatus`."""

    name: str
    role: Role
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()


def engine_processes(
    config: EngineConfig, config_path: Path, listen_fd: int | None
) -> list[ProcessSpec]:
    """The processes of `config`, slowest to start first; without a `listen_fd` there are no frontends."""

    def spec(name: str, role: Role, module: str, *args: object) -> ProcessSpec:
        # -P: a file in the current directory must not shadow a module.
        command = (sys.executable, "-P", "-m", f"engine.{module}", str(config_path))
        return ProcessSpec(name, role, command + tuple(map(str, args)))

    parallel = config.parallel
    cores = range(parallel.data_parallel_size)
    specs = [
        spec(
            f"worker {core * parallel.workers_per_core + rank}", Role.WORKER, "workers", core, rank
        )
        for core in cores
        for rank in range(parallel.workers_per_core)
    ]
    specs += [spec(f"core {core}", Role.CORE, "core", core) for core in cores]
    if listen_fd is not None:
        for client in range(parallel.api_server_count):
            frontend = spec(f"frontend {client}", Role.FRONTEND, "frontend", client, listen_fd)
            specs.append(ProcessSpec(frontend.name, frontend.role, frontend.argv, (listen_fd,)))
    return specs


class _Child:
    """One running process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.stage = Stage.STARTING
        try:
            self._popen = subprocess.Popen(
                spec.argv,
                stdin=subprocess.PIPE,
                pass_fds=spec.pass_fds,
                # A group of its own: Ctrl-C at the terminal reaches the supervisor alone.
                process_group=0,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise ConfigError(
                f"cannot start {spec.name} ({spec.argv[0]}): {error.strerror}"
            ) from error
        self.exit_fd = os.pidfd_open(self._popen.pid) if HAS_EXIT_FD else None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL to the process and what it may have started."""
        if self.alive:
            try:
                os.killpg(self._popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._popen.kill()

    def close(self) -> None:
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)

    def obituary(self) -> str:
        code = self._popen.returncode
        if code is None or code >= 0:
            return f"{self.spec.name} exited unexpectedly with code {code}; its messages are above"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            return (
                f"{self.spec.name} was killed by {name}, most likely because the machine ran out of memory; "
                "free some, or lower --kv-cache-memory-bytes or --max-num-seqs"
            )
        return f"{self.spec.name} was killed by {name}; its messages are above"


class Supervisor:
    """The life of one engine: `start`, `wait_until_ready`, `watch` or `poll`, `drain`, `close`.

    Every wait ends early with `StopRequested` when `signals` receives one, and with `ProcessFailed` when a
    process fails. Leaving the `with` block kills what still runs. `run_dir` is the caller's.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[ProcessSpec],
        *,
        on_status: Callable[[ProcessStatus], None] | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self._specs = specs
        self.drain_timeout_s = config.frontend.shutdown_timeout_s
        self._on_status = on_status
        self._signals = signals
        self._children: dict[str, _Child] = {}
        self._draining = False
        self._context = zmq.Context()
        self._statuses = StatusReceiver(self._context, config)
        self._poller = zmq.Poller()
        self._poller.register(self._statuses.socket, zmq.POLLIN)
        if signals is not None:
            self._poller.register(signals.fd, zmq.POLLIN)

    def start(self) -> None:
        """Start every process at once; they find each other."""
        for spec in self._specs:
            child = self._children[spec.name] = _Child(spec)
            if child.exit_fd is not None:
                self._poller.register(child.exit_fd, zmq.POLLIN)

    @property
    def pids(self) -> dict[str, int]:
        """The process id of every process that runs, by name."""
        return {name: child.pid for name, child in self._children.items() if child.alive}

    @property
    def ready(self) -> bool:
        """Whether the processes that face the clients are ready: the frontends, or the cores without them."""
        facing = self._with_role(Role.FRONTEND) or self._with_role(Role.CORE)
        return bool(facing) and all(child.stage is Stage.READY for child in facing)

    def wait_until_ready(self) -> None:
        while not self.ready:
            self._wait(None)

    def watch(self) -> None:
        """Wait for a stop signal or a failure: this never returns."""
        while True:
            self._wait(None)

    def poll(self) -> None:
        """Handle what has happened since the last call, without waiting."""
        self._wait(0.0)

    def drain(self) -> None:
        """Let the frontends finish their streams, then end cores and workers."""
        self._draining = True
        frontends = self._with_role(Role.FRONTEND)
        for child in frontends:
            child.terminate()
        self._wait_for_exit(frontends, self.drain_timeout_s + DRAIN_GRACE_S)
        for child in self._with_role(Role.CORE):
            child.terminate()
        self._wait_for_exit(self._children.values(), DRAIN_GRACE_S)

    def close(self) -> None:
        """Kill what still runs."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._statuses.close()
        self._context.term()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _with_role(self, role: Role) -> list[_Child]:
        return [child for child in self._children.values() if child.spec.role is role]

    def _wait_for_exit(self, children: Iterable[_Child], timeout_s: float) -> None:
        children = list(children)
        deadline = time.monotonic() + timeout_s
        while any(child.alive for child in children):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._wait(remaining)

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until something happens or `timeout_s` passes, and handle it."""
        if not HAS_EXIT_FD:
            timeout_s = WATCH_INTERVAL_S if timeout_s is None else min(timeout_s, WATCH_INTERVAL_S)
        self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        if self._signals is not None:
            self._signals.raise_if_received()
        self._read_statuses(0.0)
        for child in self._children.values():
            if not child.alive:
                self._on_exit(child)

    def _read_statuses(self, timeout_s: float) -> None:
        while (status := self._statuses.receive(int(timeout_s * 1000))) is not None:
            child = self._children.get(status.process)
            if child is None:
                continue
            child.stage = status.stage
            if self._on_status is not None:
                self._on_status(status)
            if status.stage is Stage.FAILED and not self._draining:
                raise ProcessFailed(f"{status.process}: {status.detail}")

    def _on_exit(self, child: _Child) -> None:
        if child.exit_fd is not None:
            self._poller.unregister(child.exit_fd)
            os.close(child.exit_fd)
            child.exit_fd = None
        if not self._draining:
            self._read_statuses(LAST_WORDS_S)
            raise ProcessFailed(child.obituary())
