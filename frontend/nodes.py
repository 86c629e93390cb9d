"""The other machines of the engine, as its supervisor sees them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import zmq

from ..protocol.cluster_key import cluster_key_of
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.node_messages import (
    EndNode,
    NodeHello,
    NodeLeft,
    NodeMessage,
    NodePing,
    NodeWelcome,
    ProcessExited,
    ProcessStarted,
    SignalProcess,
    StartProcess,
)
from ..protocol.supervisor_messages import ProcessReport, ProcessStatus, Stage
from ..protocol.transport import Hub
from .local_process import ProcessSpec

LOST: Final = -signal.SIGKILL
"""The exit code of the processes of a lost node: the node ends them before it joins again."""

GREETING_S: Final = 1.0
"""How long a node may take to answer a welcome."""

FAREWELL_S: Final = 2.0
"""How long nodes may take to end their processes, when they are told to."""


class RemoteProcess:
    """A process on another node. It is started when that node has joined."""

    def __init__(self, spec: ProcessSpec, epoch: int, nodes: Nodes) -> None:
        assert spec.node is not None
        self.spec = spec
        self.epoch = epoch
        self.node_rank = spec.node
        self.pid = 0
        self.exit_fd: int | None
        self.exit_fd, self._exit_writer = os.pipe()
        self.is_asked_for = False
        self.reason = f"waiting for node {spec.node}"
        self.saw_oom_kills: bool | None = None
        self._nodes = nodes
        self._returncode: int | None = None

    def poll(self) -> int | None:
        return self._returncode

    def started(self, pid: int) -> None:
        self.pid, self.reason = pid, ""

    def exited(self, returncode: int, reason: str = "") -> None:
        if self._returncode is None:
            self._returncode, self.reason = returncode, reason
            os.close(self._exit_writer)

    def send_signal(self, signum: signal.Signals) -> None:
        self._nodes.send(self.node_rank, SignalProcess(self.spec.name, signum))

    def kill(self) -> None:
        if self.is_asked_for:
            self.send_signal(signal.SIGKILL)
        else:
            self.exited(LOST)

    def close(self) -> None:
        self.exited(LOST)
        self._nodes.forget(self)


class _Node(msgspec.Struct):
    identity: bytes
    host: str
    last_heard: float


class Nodes:
    """Welcomes the nodes, has them run the processes that are launched there, and notices when one is lost."""

    def __init__(
        self, context: zmq.Context[Any], config: EngineConfig, tell: Callable[[str], None]
    ) -> None:
        """Raises ConfigError if the address of node 0 is not one of this machine, or in use."""
        self._config = config
        self._welcome = NodeWelcome(PROTOCOL_VERSION, msgspec.msgpack.encode(config))
        self._tell = tell
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
        """Of those from nodes: what did not decode or came before its sender was admitted. And what nodes dropped."""
        return self._hub.num_dropped_frames + self._num_dropped_frames

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._hub.socket

    def launch(self, spec: ProcessSpec, epoch: int) -> RemoteProcess:
        process = self._processes[spec.name] = RemoteProcess(spec, epoch, self)
        self._start_what_can()
        return process

    def forget(self, process: RemoteProcess) -> None:
        if self._processes.get(process.spec.name) is process:
            del self._processes[process.spec.name]

    def send(self, node_rank: int, message: msgspec.Struct) -> None:
        """What is sent to a node that is not there is lost."""
        if (node := self._nodes.get(node_rank)) is not None:
            self._hub.send(node.identity, message)

    def read_reports(self) -> Iterator[ProcessReport]:
        """What the processes on all nodes have reported."""
        while (received := self._hub.receive()) is not None:
            identity, message = received
            rank = next((r for r, n in self._nodes.items() if n.identity == identity), None)
            if rank is not None:
                self._nodes[rank].last_heard = time.monotonic()
            if isinstance(message, NodeHello):
                self._admit(identity, message)
            elif message is None:
                if rank is not None:
                    self._lose(rank, "has lost its connection")
                self._greet(identity)
            elif rank is None:
                if isinstance(message, NodePing):
                    self._greet(identity)
                else:
                    self._num_dropped_frames += 1
            elif isinstance(message, ProcessStarted):
                process = self._processes.get(message.name)
                if process is not None and process.epoch == message.epoch:
                    process.started(message.pid)
                    yield ProcessStatus(message.name, Stage.STARTING, pid=message.pid)
            elif isinstance(message, ProcessExited):
                process = self._processes.get(message.name)
                if process is not None and process.pid == message.pid:
                    process.exited(message.returncode, message.reason)
            elif isinstance(message, NodeLeft):
                self._lose(rank, "has left")
            elif isinstance(message, NodePing):
                self._num_dropped_frames += message.num_dropped_frames
            else:
                yield message
        self._look_after()

    def close(self, reason: str) -> None:
        """End every node, with the reason if the engine has failed."""
        for rank in self._nodes:
            self.send(rank, EndNode(reason))
        # Closing a socket with unread messages may discard those that were sent last.
        remaining = {node.identity for node in self._nodes.values()}
        deadline = time.monotonic() + FAREWELL_S
        while remaining and (wait_s := deadline - time.monotonic()) > 0:
            self._hub.socket.poll(int(wait_s * 1000) + 1)
            while (received := self._hub.receive()) is not None:
                if isinstance(received[1], NodeLeft):
                    remaining.discard(received[0])
        self._hub.close()

    def _admit(self, identity: bytes, hello: NodeHello) -> None:
        problem = self._find_problem(hello)
        if problem:
            self._hub.send(identity, EndNode(problem))
            self._tell(f"{hello.host} was sent away: {problem}")
            return
        if (before := self._nodes.get(hello.node_rank)) is not None:
            self._lose(hello.node_rank, f"is replaced by {hello.host}")
            if before.identity != identity:
                place = f"its place as node {hello.node_rank}"
                self._hub.send(before.identity, EndNode(f"{hello.host} has taken {place}"))
        self._nodes[hello.node_rank] = _Node(identity, hello.host, time.monotonic())
        self._tell(f"node {hello.node_rank} has joined: {hello.host}")
        self._start_what_can()

    def _greet(self, identity: bytes) -> None:
        """Welcome a node, but only once for the several messages it may send before it has the welcome."""
        now = time.monotonic()
        # A node that dials again has another identity.
        self._greeted = {i: at for i, at in self._greeted.items() if now - at <= GREETING_S}
        if identity not in self._greeted:
            self._greeted[identity] = now
            self._hub.send(identity, self._welcome)

    def _find_problem(self, hello: NodeHello) -> str:
        parallel = self._config.parallel
        if hello.version != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.version}, node 0 {PROTOCOL_VERSION}: install the same version"
        if hello.num_nodes != parallel.num_nodes:
            meaning = "WORLD_SIZE" if parallel.is_external else "--nnodes"
            return (
                f"{meaning} is {hello.num_nodes} there, and {parallel.num_nodes} at node 0, which has "
                f"{parallel.num_workers} workers"
            )
        first = parallel.num_nodes - parallel.num_remote_nodes
        if not first <= hello.node_rank < parallel.num_nodes:
            return f"there is no such node as {hello.node_rank}; they are {first} to {parallel.num_nodes - 1}"
        return ""

    def _start_what_can(self) -> None:
        for process in self._processes.values():
            if process.is_asked_for or process.node_rank not in self._nodes:
                continue
            host = self._rendezvous_host(process.spec.replica)
            if host is not None:
                process.is_asked_for = True
                port = self._config.rendezvous_port(process.spec.replica)
                start = StartProcess(process.spec.name, process.epoch, host, port)
                self.send(process.node_rank, start)

    def _rendezvous_host(self, core_index: int) -> str | None:
        """Where the workers of a replica meet; None if that node has not joined yet."""
        parallel = self._config.parallel
        first = parallel.node_of(core_index * parallel.workers_per_core)
        if first == 0 and not parallel.is_external:
            return parallel.master_addr
        return self._nodes[first].host if first in self._nodes else None

    def _look_after(self) -> None:
        now = time.monotonic()
        if now - self._last_ping > BEAT_INTERVAL_S:
            self._last_ping = now
            for rank in self._nodes:
                self.send(rank, NodePing())
        for rank, node in list(self._nodes.items()):
            silent_s = now - node.last_heard
            if silent_s > self._config.recovery.heartbeat_timeout_s:
                self._lose(rank, f"has given no sign of life for {silent_s:.1f} s")

    def _lose(self, rank: int, how: str) -> None:
        host = self._nodes.pop(rank).host
        self._tell(f"node {rank} ({host}) {how}")
        for process in self._processes.values():
            if process.node_rank == rank and process.is_asked_for:
                process.exited(LOST, f"its machine, node {rank}, {how}")
