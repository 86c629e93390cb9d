"""The supervisor's connections to the engine's other machines (nodes)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgspec
import zmq

from ...protocol.cluster_key import cluster_key_of
from ...protocol.config import PROTOCOL_VERSION, EngineConfig
from ...protocol.errors import counted
from ...protocol.heartbeat import BEAT_INTERVAL_S
from ...protocol.supervisor_messages import (
    EndNode,
    Heartbeat,
    NodeHello,
    NodeLeft,
    NodeMessage,
    NodePing,
    NodeWelcome,
    ProcessExited,
    ProcessStarted,
    ProcessStatus,
    SignalProcess,
    Stage,
    StartProcess,
)
from ...protocol.transport import Hub
from .local_process import LocalProcess, ProcessSpec

LOST: Final = -signal.SIGKILL
"""The exit code recorded for processes of a lost node. The node kills them before it joins again."""

GREETING_S: Final = 1.0
"""Maximum seconds for a node to answer a welcome."""

FAREWELL_S: Final = 5.0
"""Maximum seconds for nodes to stop their processes at shutdown."""


class RemoteProcess:
    """A process on another node. It is started once that node has joined."""

    def __init__(self, spec: ProcessSpec, epoch: int, nodes: Nodes) -> None:
        assert spec.node is not None
        self.spec = spec
        self.epoch = epoch
        self.node_rank = spec.node
        self.pid = 0
        self.exit_fd: int | None
        self.exit_fd, self._exit_writer = os.pipe()
        self.was_requested = False
        self.reason = f"waiting for node {spec.node}"
        self.saw_oom_kills: bool | None = None
        self._nodes = nodes
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._returncode

    def record_start(self, pid: int) -> None:
        """Record that the node has started the process."""
        self.pid, self.reason = pid, ""

    def record_exit(self, returncode: int, reason: str = "") -> None:
        """Record that the process has exited. Later calls do nothing."""
        if self._returncode is None:
            self._returncode, self.reason = returncode, reason
            os.close(self._exit_writer)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        self._nodes.send(self.node_rank, SignalProcess(self.spec.name, signum))

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.was_requested:
            self.send_signal(signal.SIGKILL)
        else:
            self.record_exit(LOST)

    def close(self) -> None:
        """Stop tracking the process."""
        self.record_exit(LOST)
        self._nodes.remove_process(self)


Process: TypeAlias = LocalProcess | RemoteProcess
"""A process that was started, on this machine or another."""


class _Node(msgspec.Struct):
    identity: bytes
    host: str
    last_message_at: float


class Nodes:
    """Admits nodes, starts processes on them, and detects lost nodes."""

    def __init__(
        self, context: zmq.Context[Any], config: EngineConfig, report: Callable[[str], None]
    ) -> None:
        """Listen for nodes. Raise ConfigError if the address of node 0 does not belong to this machine or is in use."""
        self._config = config
        self._welcome = NodeWelcome(PROTOCOL_VERSION, msgspec.msgpack.encode(config))
        self._report = report
        self._hub: Hub[NodeMessage] = Hub(
            context, config.parallel.node_address, NodeMessage, cluster_key_of(config)
        )
        self._nodes: dict[int, _Node] = {}
        self._processes: dict[str, RemoteProcess] = {}
        self._greeted: dict[bytes, float] = {}
        self._last_ping = 0.0
        self._num_dropped_frames = 0

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames from nodes, plus the number of frames that the nodes dropped.

        Frames from a node that has not been admitted count as invalid.
        """
        return self._hub.num_dropped_frames + self._num_dropped_frames

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket to poll for messages from nodes."""
        return self._hub.socket

    def launch(self, spec: ProcessSpec, epoch: int) -> RemoteProcess:
        """Start a process as soon as its node has joined."""
        process = self._processes[spec.name] = RemoteProcess(spec, epoch, self)
        self._start_ready_processes()
        return process

    def remove_process(self, process: RemoteProcess) -> None:
        """Stop tracking a process."""
        if self._processes.get(process.spec.name) is process:
            del self._processes[process.spec.name]

    def send(self, node_rank: int, message: msgspec.Struct) -> None:
        """Send a message to a node. It is dropped if the node is not connected."""
        if (node := self._nodes.get(node_rank)) is not None:
            self._hub.send(node.identity, message)

    def read_reports(self) -> Iterator[ProcessStatus | Heartbeat]:
        """Yield the reports of the processes on all nodes."""
        while (received := self._hub.receive()) is not None:
            identity, message = received
            rank = next((r for r, n in self._nodes.items() if n.identity == identity), None)
            if rank is not None:
                self._nodes[rank].last_message_at = time.monotonic()
            if isinstance(message, NodeHello):
                self._admit(identity, message)
            elif message is None:
                if rank is not None:
                    self._lose(rank, "lost its connection")
                self._greet(identity)
            elif rank is None:
                if isinstance(message, NodePing):
                    self._greet(identity)
                elif isinstance(message, NodeLeft):
                    if message.refusal:
                        self._report(f"a node did not join: {message.refusal}")
                else:
                    self._num_dropped_frames += 1
            elif isinstance(message, ProcessStarted):
                process = self._processes.get(message.name)
                if process is not None and process.epoch == message.epoch:
                    process.record_start(message.pid)
                    yield ProcessStatus(message.name, Stage.STARTING, pid=message.pid)
            elif isinstance(message, ProcessExited):
                process = self._processes.get(message.name)
                if process is not None and process.pid == message.pid:
                    process.record_exit(message.returncode, message.reason)
            elif isinstance(message, NodeLeft):
                self._lose(rank, "left")
            elif isinstance(message, NodePing):
                self._num_dropped_frames += message.num_dropped_frames
            else:
                yield message
        self._check_nodes()

    def close(self, reason: str) -> None:
        """Stop every node. Pass a `reason` if the engine has failed.

        A node that is lost or about to join, but still sends messages, is stopped too. Otherwise it would wait for
        another engine.
        """
        end = EndNode(reason)
        remaining = {node.identity for node in self._nodes.values()}
        told = set(remaining)
        for identity in remaining:
            self._hub.send(identity, end)
        began = time.monotonic()
        # Closing a socket with unread messages may discard the messages that were sent last.
        while True:
            is_whole = len(told) >= self._config.parallel.num_remote_nodes
            limit_s = FAREWELL_S if remaining else 0.0 if is_whole else BEAT_INTERVAL_S
            if (wait_s := began + limit_s - time.monotonic()) <= 0:
                break
            self._hub.socket.poll(int(wait_s * 1000) + 1)
            while (received := self._hub.receive()) is not None:
                identity, message = received
                if isinstance(message, NodeLeft):
                    remaining.discard(identity)
                elif identity not in told:
                    told.add(identity)
                    remaining.add(identity)
                    self._hub.send(identity, end)
        self._hub.close()

    def _admit(self, identity: bytes, hello: NodeHello) -> None:
        problem = self._find_problem(hello)
        if problem:
            self._hub.send(identity, EndNode(problem))
            self._report(f"rejected {hello.host}: {problem}")
            return
        if (before := self._nodes.get(hello.node_rank)) is not None:
            self._lose(hello.node_rank, f"was replaced by {hello.host}")
            if before.identity != identity:
                place = f"its place as node {hello.node_rank}"
                self._hub.send(before.identity, EndNode(f"{hello.host} took over {place}"))
        self._nodes[hello.node_rank] = _Node(identity, hello.host, time.monotonic())
        self._report(f"node {hello.node_rank} joined: {hello.host}")
        self._start_ready_processes()

    def _greet(self, identity: bytes) -> None:
        """Welcome a node, only once even if it sends several messages before it receives the welcome."""
        now = time.monotonic()
        # A node that reconnects has another socket identity.
        self._greeted = {i: at for i, at in self._greeted.items() if now - at <= GREETING_S}
        if identity not in self._greeted:
            self._greeted[identity] = now
            self._hub.send(identity, self._welcome)

    def _find_problem(self, hello: NodeHello) -> str:
        parallel = self._config.parallel
        if hello.version != PROTOCOL_VERSION:
            return f"it has protocol version {hello.version}, but node 0 has {PROTOCOL_VERSION}; install the same version of Engine"
        if hello.num_nodes != parallel.num_nodes:
            meaning = "WORLD_SIZE" if parallel.is_external else "--nnodes"
            return (
                f"{meaning} is {hello.num_nodes} there, but {parallel.num_nodes} on node 0, which has "
                f"{counted(parallel.num_workers, 'worker')}; use the same value"
            )
        first = parallel.num_nodes - parallel.num_remote_nodes
        if not first <= hello.node_rank < parallel.num_nodes:
            return f"node rank {hello.node_rank} is out of range; use {first} to {parallel.num_nodes - 1}"
        return ""

    def _start_ready_processes(self) -> None:
        for process in self._processes.values():
            if process.was_requested or process.node_rank not in self._nodes:
                continue
            host = self._rendezvous_host(process.spec.replica)
            if host is not None:
                process.was_requested = True
                port = self._config.rendezvous_port(process.spec.replica)
                start = StartProcess(process.spec.name, process.epoch, host, port)
                self.send(process.node_rank, start)

    def _rendezvous_host(self, core_index: int) -> str | None:
        """Return the host where the workers of a replica connect to each other.

        Return None if the node of that host has not joined yet.
        """
        parallel = self._config.parallel
        first = parallel.node_of(parallel.group_of(core_index) * parallel.workers_per_core)
        if first == 0 and not parallel.is_external:
            return parallel.master_addr
        return self._nodes[first].host if first in self._nodes else None

    def _check_nodes(self) -> None:
        now = time.monotonic()
        if now - self._last_ping > BEAT_INTERVAL_S:
            self._last_ping = now
            for rank in self._nodes:
                self.send(rank, NodePing())
        for rank, node in list(self._nodes.items()):
            silent_s = now - node.last_message_at
            if silent_s > self._config.recovery.heartbeat_timeout_s:
                self._lose(rank, f"sent no heartbeat for {silent_s:.1f} s")

    def _lose(self, rank: int, how: str) -> None:
        host = self._nodes.pop(rank).host
        self._report(f"node {rank} ({host}) {how}")
        for process in self._processes.values():
            if process.node_rank == rank and process.was_requested:
                process.record_exit(LOST, f"its machine, node {rank}, {how}")
