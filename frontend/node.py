"""A machine that runs workers for an engine whose cores and frontends are elsewhere.

It does what the supervisor on node 0 says, and decides two things alone. When node 0 is silent for as long as makes a
process count as hung, it ends its workers, since their replica is being started anew without them; then it dials the
same address again. And when it is asked to stop, its workers stay for as long as node 0 may be draining, for all
machines may have been asked at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from dataclasses import replace
from typing import Any, Final

import msgspec
import zmq

from ..protocol.cluster_key import load_cluster_key
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.errors import EngineError
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.node_messages import (
    EndNode,
    NodeCommand,
    NodeHello,
    NodeLeft,
    NodePing,
    NodeWelcome,
    ProcessExited,
    ProcessStarted,
    SignalProcess,
    StartProcess,
)
from ..protocol.transport import Peer, StatusReceiver
from .console import Console
from .local_process import LocalProcess, ProcessSpec
from .run_dir import RunDirectory
from .stop_signals import StopRequested, StopSignals
from .supervisor import DRAIN_GRACE_S, engine_processes

LAST_WORDS_S: Final = 0.1
"""How long the last report of a process that has ended is waited for."""

FAREWELL_MS: Final = 500
"""How long the last message to node 0 may take."""

REMINDER_S: Final = 10.0
"""How often a node that gets no answer says so."""


class NodePlace(msgspec.Struct, frozen=True):
    """Which node this is, of how many, and where node 0 is.

    `cluster_key` is the path of the key file. The model is where node 0 has it, unless there is a `model_path`.
    """

    master_addr: str
    master_port: int
    rank: int
    num_nodes: int
    cluster_key: str
    model_path: str | None = None

    @property
    def address(self) -> str:
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


class Node:
    """`run` it in a `with` block, at the end of which the workers are killed."""

    def __init__(self, place: NodePlace, console: Console, signals: StopSignals) -> None:
        self._place = place
        self._console = console
        self._signals = signals
        self._key = load_cluster_key(place.cluster_key)
        self._context: zmq.Context[Any] = zmq.Context()
        self._run_dir = RunDirectory()
        self._statuses: StatusReceiver | None = None
        self._specs: dict[str, ProcessSpec] = {}
        self._processes: dict[str, LocalProcess] = {}
        self._config: EngineConfig | None = None
        self._poller = zmq.Poller()
        self._poller.register(signals.fd, zmq.POLLIN)
        self._last_ping = 0.0
        self._num_told_dropped_frames = 0
        self._leave_at = math.inf
        self._dial()

    def run(self) -> None:
        """Returns when the engine has stopped, or some time after a stop signal, or at the second.

        Raises EngineError, with node 0's reason, when it failed.
        """
        self._console.line(f"node {self._place.rank} dials {self._place.address}")
        reminded = time.monotonic()
        while True:
            self._poller.poll(int(BEAT_INTERVAL_S * 1000))
            try:
                self._signals.raise_if_received()
            except StopRequested:
                if not self._processes or self._leave_at < math.inf:
                    return
                self._stay_for_a_drain()
            while (command := self._peer.receive()) is not None:
                self._last_heard = time.monotonic()
                if isinstance(command, EndNode):
                    if command.reason:
                        raise EngineError(command.reason)
                    return
                self._obey(command)
            self._pass_on_reports()
            self._notice_ends()
            now = time.monotonic()
            if self._config is not None and now - self._last_ping > BEAT_INTERVAL_S / 2:
                self._last_ping = now
                self._peer.send(NodePing(self._count_dropped_frames()))
            if now - self._last_heard > self._patience_s:
                self._lose_master()
            if now > self._leave_at or (self._leave_at < math.inf and not self._processes):
                return
            if self._config is None and now - reminded > REMINDER_S:
                reminded = now
                self._console.line(
                    f"no answer from {self._place.address} yet; is engine serve running there, and is "
                    f"{self._place.cluster_key} the same file?"
                )

    @property
    def _patience_s(self) -> float:
        return float("inf") if self._config is None else self._config.recovery.heartbeat_timeout_s

    def _count_dropped_frames(self) -> int:
        """Since the last call."""
        total = self._peer.num_dropped_frames
        if self._statuses is not None:
            total += self._statuses.num_dropped_frames
        new, self._num_told_dropped_frames = total - self._num_told_dropped_frames, total
        return new

    def _dial(self) -> None:
        identity = b"node" + os.urandom(8)
        self._peer: Peer[NodeCommand] = Peer(
            self._context, self._place.address, identity, NodeCommand, self._key
        )
        self._poller.register(self._peer.socket, zmq.POLLIN)
        self._last_heard = time.monotonic()

    def _stay_for_a_drain(self) -> None:
        assert self._config is not None
        patience_s = self._config.frontend.shutdown_timeout_s + DRAIN_GRACE_S
        self._leave_at = time.monotonic() + patience_s
        self._console.line(
            f"stopping: the workers stay until node 0 has drained, at most {patience_s:g} s; "
            "a second signal ends them at once"
        )

    def _lose_master(self) -> None:
        self._console.line(f"node 0 has given no sign of life for {self._patience_s:g} s")
        self._end_processes()
        self._config = None
        self._poller.unregister(self._peer.socket)
        self._num_told_dropped_frames -= self._peer.num_dropped_frames
        self._peer.close()
        self._dial()

    def _obey(self, command: NodeCommand) -> None:
        if isinstance(command, NodeWelcome):
            self._join(command)
        elif isinstance(command, StartProcess):
            self._start(command)
        elif isinstance(command, SignalProcess):
            process = self._processes.get(command.name)
            if process is not None and command.signum == signal.SIGKILL:
                process.kill()
            elif process is not None:
                process.send_signal(signal.Signals(command.signum))

    def _join(self, welcome: NodeWelcome) -> None:
        self._end_processes()
        place = self._place
        if welcome.version != PROTOCOL_VERSION:
            raise EngineError(
                f"node 0 speaks protocol {welcome.version}, this one {PROTOCOL_VERSION}: install the same version"
            )
        self._config = config = self._adapt(
            msgspec.msgpack.decode(welcome.config, type=EngineConfig)
        )
        if self._statuses is None:
            self._statuses = StatusReceiver(self._context, config)
            self._poller.register(self._statuses.socket, zmq.POLLIN)
        specs = engine_processes(config, config.save(), None)
        self._specs = {spec.name: spec for spec in specs if spec.node == place.rank}
        host = _address_towards(place.master_addr, place.master_port)
        self._peer.send(NodeHello(PROTOCOL_VERSION, place.rank, place.num_nodes, host))
        self._console.line(f"joined {place.address}: {', '.join(self._specs)}")

    def _adapt(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what is different on this machine."""
        place = self._place
        return msgspec.structs.replace(
            config,
            run_dir=self._run_dir.path,
            model=msgspec.structs.replace(config.model, path=place.model_path or config.model.path),
            parallel=msgspec.structs.replace(
                config.parallel, master_addr=place.master_addr, cluster_key=place.cluster_key
            ),
        )

    def _start(self, command: StartProcess) -> None:
        spec = self._specs.get(command.name)
        if spec is None:
            return
        env = {
            "MASTER_ADDR": command.master_addr,
            "MASTER_PORT": str(command.master_port),
            # torchrun's own store outlives the workers, and the next would dial the addresses of the dead in it.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        process = LocalProcess(replace(spec, env=env), command.epoch)
        self._processes[command.name] = process
        if process.exit_fd is not None:
            self._poller.register(process.exit_fd, zmq.POLLIN)
        self._peer.send(ProcessStarted(command.name, command.epoch, process.pid))

    def _pass_on_reports(self, patience_s: float = 0.0) -> None:
        """Those that are here, and those that come within `patience_s`, however many."""
        if self._statuses is None:
            return
        deadline = time.monotonic() + patience_s
        while True:
            wait_s = max(deadline - time.monotonic(), 0.0)
            if (report := self._statuses.receive(math.ceil(wait_s * 1000))) is None:
                return
            self._peer.send(report)

    def _notice_ends(self) -> None:
        for name, process in list(self._processes.items()):
            if (returncode := process.poll()) is not None:
                self._pass_on_reports(LAST_WORDS_S)
                self._peer.send(ProcessExited(name, process.pid, returncode, process.reason))
                self._forget(name)

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()
        for name in list(self._processes):
            self._forget(name)

    def _forget(self, name: str) -> None:
        process = self._processes.pop(name)
        if process.exit_fd is not None:
            self._poller.unregister(process.exit_fd)
            os.close(process.exit_fd)
        process.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_processes()
        self._peer.send(NodeLeft())
        self._peer.socket.close(linger=FAREWELL_MS)
        if self._statuses is not None:
            self._statuses.close()
        self._context.term()
        self._run_dir.remove()


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that it reaches `host` from."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
