"""A machine that runs workers for an engine whose cores and frontends run elsewhere.

The node executes the commands of the supervisor on node 0, with two exceptions. If node 0 sends nothing for the
heartbeat timeout, it kills its workers, because their replica restarts without them, and connects again. After a stop
signal, its workers keep running for as long as node 0 may be draining, because all machines may have received the
signal at the same time.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from msgspec.structs import replace

from ...protocol.checkpoint.content_hash import hash_content
from ...protocol.checkpoint.files import find_weight_files
from ...protocol.cluster_key import load_cluster_key
from ...protocol.config import PROTOCOL_VERSION, Device, EngineConfig
from ...protocol.errors import EngineError
from ...protocol.file_identity import identify_copies
from ...protocol.heartbeat import BEAT_INTERVAL_S, HeartbeatReader, seconds_to_read
from ...protocol.supervisor_messages import (
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
from ...protocol.transport import Peer, StatusReceiver
from .console import Console
from .engine_processes import engine_processes
from .launcher import Launcher
from .local_process import ProcessSpec
from .nodes import Process
from .run_dir import RunDirectory
from .signals import StopRequested, StopSignals
from .supervisor import DRAIN_GRACE_S

FINAL_ERROR_S: Final = 0.1
"""Seconds to wait for the last report of a process that exited."""

FAREWELL_MS: Final = 500
"""Maximum milliseconds to send the last message to node 0."""

REMINDER_S: Final = 10.0
"""Seconds between log lines while node 0 does not answer."""


class NodePlace(msgspec.Struct, frozen=True):
    """The rank of this node, the number of nodes, and the address of node 0.

    `cluster_key` is the path of the key file. The model has the same path as on node 0 unless `model_path` is set.
    """

    master_addr: str
    master_port: int
    rank: int
    num_nodes: int
    cluster_key: str
    model_path: str | None = None

    @property
    def address(self) -> str:
        """The ZeroMQ address of node 0."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


class Node:
    """One node other than node 0. Call `run` in a `with` block, which kills the workers at its end."""

    def __init__(self, place: NodePlace, console: Console, signals: StopSignals) -> None:
        self._place = place
        self._console = console
        self._signals = signals
        self._key = load_cluster_key(place.cluster_key)
        self._context: zmq.Context[Any] = zmq.Context()
        self._run_dir = RunDirectory()
        self._launcher = Launcher()
        self._statuses: StatusReceiver | None = None
        self._heartbeats: HeartbeatReader | None = None
        self._specs: dict[str, ProcessSpec] = {}
        self._processes: dict[str, Process] = {}
        self._config: EngineConfig | None = None
        self._poller = zmq.Poller()
        self._poller.register(signals.fd, zmq.POLLIN)
        self._last_ping = 0.0
        self._num_reported_dropped_frames = 0
        self._leave_at = math.inf
        self._refusal = ""
        self._connect()

    def run(self) -> None:
        """Run until the engine stops, a while after a first stop signal, or until a second one.

        Raises:
            EngineError: The engine failed. The message is the reason that node 0 sent.
        """
        self._console.line(f"node {self._place.rank} connects to {self._place.address}")
        reminded = time.monotonic()
        while True:
            self._poller.poll(math.ceil(seconds_to_read() * 1000))
            try:
                self._signals.raise_if_received()
            except StopRequested:
                if not self._processes or self._leave_at < math.inf:
                    return
                self._wait_for_drain()
            while (command := self._peer.receive()) is not None:
                self._last_message_at = time.monotonic()
                if isinstance(command, EndNode):
                    if command.reason:
                        raise EngineError(command.reason)
                    return
                self._apply_command(command)
            self._forward_reports()
            self._handle_exits()
            now = time.monotonic()
            if self._config is not None and now - self._last_ping > BEAT_INTERVAL_S / 2:
                self._last_ping = now
                self._peer.send(NodePing(self._count_dropped_frames()))
            if now - self._last_message_at > self._patience_s:
                self._lose_master()
            if now > self._leave_at or (self._leave_at < math.inf and not self._processes):
                return
            if self._config is None and now - reminded > REMINDER_S:
                reminded = now
                self._console.line(
                    f"no answer from {self._place.address} yet; check that engine serve is running there, "
                    f"with the same key file as {self._place.cluster_key}"
                )

    @property
    def _patience_s(self) -> float:
        return float("inf") if self._config is None else self._config.recovery.heartbeat_timeout_s

    def _count_dropped_frames(self) -> int:
        """Return the number of invalid frames that were dropped since the last call."""
        total = self._peer.num_dropped_frames
        if self._statuses is not None:
            total += self._statuses.num_dropped_frames
        new, self._num_reported_dropped_frames = total - self._num_reported_dropped_frames, total
        return new

    def _connect(self) -> None:
        identity = b"node" + os.urandom(8)
        self._peer: Peer[NodeCommand] = Peer(
            self._context, self._place.address, identity, NodeCommand, self._key
        )
        self._poller.register(self._peer.socket, zmq.POLLIN)
        self._last_message_at = time.monotonic()

    def _wait_for_drain(self) -> None:
        assert self._config is not None
        patience_s = self._config.frontend.shutdown_timeout_s + DRAIN_GRACE_S
        self._leave_at = time.monotonic() + patience_s
        self._console.line(
            f"stopping: workers keep running while node 0 drains, for at most {patience_s:g} s; "
            "a second signal stops them immediately"
        )

    def _lose_master(self) -> None:
        self._console.line(
            f"node 0 sent no message for {self._patience_s:g} s; stopping the workers and reconnecting"
        )
        self._end_processes()
        self._config = None
        self._poller.unregister(self._peer.socket)
        self._num_reported_dropped_frames -= self._peer.num_dropped_frames
        self._peer.close()
        self._connect()

    def _apply_command(self, command: NodeCommand) -> None:
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
                f"node 0 has protocol version {welcome.version}, but this machine has {PROTOCOL_VERSION}; "
                "install the same version of Engine"
            )
        try:
            config = self._adapt(msgspec.msgpack.decode(welcome.config, type=EngineConfig))
        except EngineError as error:
            self._refusal = str(error)
            raise
        self._config = config
        if self._statuses is None:
            self._statuses = StatusReceiver(self._context, config)
            self._poller.register(self._statuses.socket, zmq.POLLIN)
        specs = engine_processes(config, config.save(), None)
        self._specs = {spec.name: spec for spec in specs if spec.node == place.rank}
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._heartbeats = HeartbeatReader(config, self._specs)
        host = _address_towards(place.master_addr, place.master_port)
        self._peer.send(NodeHello(PROTOCOL_VERSION, place.rank, place.num_nodes, host))
        self._console.line(f"joined {place.address}: {', '.join(self._specs)}")

    def _adapt(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of node 0 with the values that differ on this machine."""
        place = self._place
        path = place.model_path or config.model.path
        files = config.model.weight_files
        if config.device.device is not Device.NULL:
            files = identify_copies(find_weight_files(Path(path)), files, hash_content)
        return msgspec.structs.replace(
            config,
            run_dir=self._run_dir.path,
            model=msgspec.structs.replace(config.model, path=path, weight_files=files),
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
            # torchrun's rendezvous store outlives the workers, so new workers would connect to the addresses of exited
            # ones.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        process = self._launcher.launch(replace(spec, node=None, env=env), command.epoch)
        self._processes[command.name] = process
        if process.exit_fd is not None:
            self._poller.register(process.exit_fd, zmq.POLLIN)
        self._peer.send(ProcessStarted(command.name, command.epoch, process.pid))

    def _forward_reports(self, patience_s: float = 0.0) -> None:
        """Forward all available reports, and those that arrive within `patience_s` seconds."""
        if self._statuses is None or self._heartbeats is None:
            return
        pids = {process.pid for process in self._processes.values()}
        for heartbeat, _ in self._heartbeats.read():
            if heartbeat.pid in pids:
                self._peer.send(heartbeat)
        deadline = time.monotonic() + patience_s
        while True:
            wait_s = max(deadline - time.monotonic(), 0.0)
            if (report := self._statuses.receive(math.ceil(wait_s * 1000))) is None:
                return
            self._peer.send(report)

    def _handle_exits(self) -> None:
        for name, process in list(self._processes.items()):
            if (returncode := process.poll()) is not None:
                self._forward_reports(FINAL_ERROR_S)
                self._peer.send(ProcessExited(name, process.pid, returncode, process.reason))
                self._remove_process(name)

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()
        for name in list(self._processes):
            self._remove_process(name)

    def _remove_process(self, name: str) -> None:
        process = self._processes.pop(name)
        if process.exit_fd is not None:
            self._poller.unregister(process.exit_fd)
            os.close(process.exit_fd)
        process.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_processes()
        self._peer.send(NodeLeft(self._refusal))
        self._peer.socket.close(linger=FAREWELL_MS)
        if self._statuses is not None:
            self._statuses.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._context.term()
        self._launcher.close()
        self._run_dir.remove()


def _address_towards(host: str, port: int) -> str:
    """Return the address of this machine's interface that leads to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
