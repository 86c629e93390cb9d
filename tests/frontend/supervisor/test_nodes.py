"""Node 0's connections to other machines, and a real node that connects to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine.frontend.supervisor.engine_processes import engine_processes
from engine.frontend.supervisor.nodes import Nodes, RemoteProcess
from engine.protocol.cluster_key import ClusterKey
from engine.protocol.config import (
    PROTOCOL_VERSION,
    Device,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
)
from engine.protocol.supervisor_messages import (
    EndNode,
    Heartbeat,
    NodeCommand,
    NodeHello,
    NodeLeft,
    NodePing,
    NodeWelcome,
    ProcessExited,
    ProcessStarted,
    ProcessStatus,
    Stage,
)
from engine.protocol.transport import Peer
from support.processes.machines import Machine, free_ports, program
from support.processes.program import Program
from support.processes.waiting import is_running
from support.servers.server import default_model

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
REPORT = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.PUSH)
socket.connect(sys.argv[1])
while True:
    socket.send(bytes.fromhex(sys.argv[2]))
    time.sleep(0.003)
"""
encode = msgspec.msgpack.encode


class NodeZero:
    """The supervisor's part for other machines, in this process. Node 1 runs worker 1, whose core does not exist."""

    def __init__(self, directory: Path, runtime: Path) -> None:
        self.key = ClusterKey.generate()
        self.key_path = str(directory / "key")
        self.key.save(self.key_path)
        self.runtime = runtime
        path = default_model()
        self.config = EngineConfig(
            str(directory),
            1,
            ModelConfig("m", path, path, ("m",), "llama", 1000, 256, (0,)),
            parallel=ParallelConfig(
                data_parallel_size=2,
                nnodes=2,
                master_port=free_ports("127.0.0.1", 8),
                cluster_key=self.key_path,
            ),
            device=DeviceConfig(device=Device.NULL),
        )
        self.context: zmq.Context[Any] = zmq.Context()
        self.messages: list[str] = []
        self.reports: list[ProcessStatus | Heartbeat] = []
        self.nodes = Nodes(self.context, self.config, self.messages.append)

    def launch(self) -> RemoteProcess:
        spec = next(s for s in engine_processes(self.config, Path(), None) if s.node == 1)
        return self.nodes.launch(spec, 1)

    def headless(self) -> Program:
        place = ("-n", "2", "-r", "1", "--master-port", str(self.config.parallel.master_port))
        here = Machine("127.0.0.1", env={"XDG_RUNTIME_DIR": str(self.runtime)})
        return program(here, "serve", "--headless", *place, "--cluster-key", self.key_path)

    def read_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, (what, self.messages)
            self.nodes.socket.poll(50)
            self.reports += self.nodes.read_reports()

    def stranger(self, key: ClusterKey | None) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        if key is not None:
            key.secure_client(dealer)
        dealer.connect(self.config.parallel.node_address)
        return dealer


@pytest.fixture
def node_zero(tmp_path: Path) -> Iterator[NodeZero]:
    # The path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as runtime:
        node_zero = NodeZero(tmp_path, Path(runtime))
        yield node_zero
        node_zero.context.destroy(linger=0)


def test_node_reports_an_exit_while_other_processes_report_constantly(node_zero: NodeZero) -> None:
    process = node_zero.launch()
    with node_zero.headless() as node:
        node_zero.read_until(lambda: process.pid != 0, "the worker runs")
        (reports,) = node_zero.runtime.rglob("supervisor")
        frame = encode(ProcessStatus("other", Stage.STARTING, pid=9)).hex()
        report = [sys.executable, "-c", REPORT, f"ipc://{reports}", frame]
        others = [subprocess.Popen(report) for _ in range(3)]
        try:
            node_zero.read_until(lambda: len(node_zero.reports) > 100, "the others have reported")
            os.kill(process.pid, signal.SIGKILL)
            node_zero.read_until(lambda: process.poll() is not None, "its exit is reported")
        finally:
            for other in others:
                other.kill()
                other.wait()
        assert process.poll() == -signal.SIGKILL
        node_zero.nodes.close("")
        assert node.wait() == 0, node.log


def test_malformed_node_messages_are_dropped_and_node_still_joins(node_zero: NodeZero) -> None:
    rng = random.Random(1)
    hello = encode(NodeHello(PROTOCOL_VERSION, 1, 2, "thief"))
    garbage = [b"\xc1" + rng.randbytes(rng.randrange(60)) for _ in range(100)]
    garbage += [hello[:end] for end in range(1, len(hello))]
    garbage += [b"\xdd\xff\xff\xff\xff", b"\x95\xa5hello\xc6\xff\xff\xff\xff"]
    insiders = node_zero.stranger(node_zero.key)
    outsiders = [node_zero.stranger(None), node_zero.stranger(ClusterKey.generate())]
    for frame in (*garbage, hello):
        for outsider in outsiders:
            # Sending fails once node zero has refused the connection.
            with contextlib.suppress(zmq.Again):
                outsider.send(frame, zmq.NOBLOCK)
    for frame in garbage:
        insiders.send(frame, zmq.NOBLOCK)
    insiders.send_multipart((hello, hello))
    # Messages that no node may send before it has joined, and invalid identities.
    insiders.send(encode(ProcessStarted("worker 1", 1, 7)))
    insiders.send(encode(ProcessExited("worker 1", 0, 1, "invalid")))
    num_lies = len(garbage) + 3
    for rank in (-1, 0, 2**40):
        insiders.send(encode(NodeHello(PROTOCOL_VERSION, rank, 2, "thief")))
    insiders.send(encode(NodeHello(PROTOCOL_VERSION + 1, 1, 2, "an old thief")))
    process = node_zero.launch()
    node_zero.read_until(lambda: "an old thief" in "".join(node_zero.messages), "all is read")
    endings = [msgspec.msgpack.decode(insiders.recv(), type=NodeCommand) for _ in range(4)]
    assert all(isinstance(ending, EndNode) for ending in endings)
    assert "has protocol version" in endings[-1].reason
    assert node_zero.nodes.num_dropped_frames == num_lies
    assert process.pid == 0 and process.poll() is None
    with node_zero.headless() as node:
        node_zero.read_until(lambda: process.pid != 0, "the worker runs")
        assert is_running(process.pid)
        node_zero.nodes.close("")
        assert node.wait() == 0, node.log
    for peer in (insiders, *outsiders):
        peer.close()
    assert node_zero.nodes.num_dropped_frames == num_lies
    assert [message for message in node_zero.messages if "joined" in message] == [
        "node 1 joined: 127.0.0.1"
    ]


def keepalive_timers(port: int) -> list[float]:
    """Return the keepalive timer in seconds of each connection to and from a port of this machine."""
    timers = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, ours, theirs, state, _, timer, *_ = line.split()
        kind, _, ticks = timer.partition(":")
        if state == "01" and port in (int(ours[-4:], 16), int(theirs[-4:], 16)) and kind == "02":
            timers.append(int(ticks, 16) / os.sysconf("SC_CLK_TCK"))
    return timers


def test_idle_node_connections_send_heartbeats(node_zero: NodeZero) -> None:
    parallel = node_zero.config.parallel
    peer: Peer[Any] = Peer(
        node_zero.context, parallel.node_address, b"node", NodeCommand, node_zero.key
    )
    node_zero.read_until(lambda: peer.receive() is not None, "they have met")
    node_zero.read_until(lambda: len(keepalive_timers(parallel.master_port)) == 2, "both ends")
    assert max(keepalive_timers(parallel.master_port)) <= 60
    peer.close()


def test_dropped_frames_of_all_nodes_are_counted(node_zero: NodeZero) -> None:
    nodes = node_zero.nodes
    with zmq.Context() as context:
        address = node_zero.config.parallel.node_address
        node: Peer[NodeCommand] = Peer(context, address, b"node", NodeCommand, node_zero.key)
        node_zero.read_until(lambda: isinstance(node.receive(), NodeWelcome), "it is greeted")
        node.send(ProcessStarted("worker 1", 1, 7))
        node.socket.send(b"\xc1garbage")
        node_zero.read_until(lambda: nodes.num_dropped_frames == 2, "both are dropped")
        node.send(NodeHello(PROTOCOL_VERSION, 1, 2, "host"))
        node_zero.read_until(lambda: node_zero.messages == ["node 1 joined: host"], "it joins")
        for count in (3, 0, 1):
            node.send(NodePing(count))
        node_zero.read_until(
            lambda: nodes.num_dropped_frames == 6, "its dropped frames are reported"
        )
        # Node 0 waits for the others to end.
        node.send(NodeLeft())
        nodes.close("")
        node.close()


def test_a_node_that_has_not_joined_is_stopped_too(node_zero: NodeZero) -> None:
    with zmq.Context() as context:
        address = node_zero.config.parallel.node_address
        node: Peer[NodeCommand] = Peer(context, address, b"node", NodeCommand, node_zero.key)
        node_zero.read_until(lambda: isinstance(node.receive(), NodeWelcome), "it is greeted")
        node.send(NodePing(0))
        stopping = threading.Thread(target=node_zero.nodes.close, args=("the engine failed",))
        stopping.start()
        assert node.socket.poll(TIMEOUT_S * 1000)
        assert node.receive() == EndNode("the engine failed")
        node.send(NodeLeft(""))
        stopping.join()
        node.close()
