"""The other machines of an engine, as its supervisor hears them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from engine.frontend.nodes import Nodes
from engine.protocol.cluster_key import ClusterKey
from engine.protocol.config import PROTOCOL_VERSION, ParallelConfig
from engine.protocol.node_messages import (
    NodeCommand,
    NodeHello,
    NodePing,
    NodeWelcome,
    ProcessStarted,
)
from engine.protocol.transport import Peer
from msgspec.structs import replace
from support.machines import free_ports
from support.processes import eventually
from support.stand_ins import make_config


def test_frames_that_are_dropped_here_and_on_the_nodes_are_counted(tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.save(str(tmp_path / "key"))
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        nnodes=2,
        master_port=free_ports("127.0.0.1", 1),
        cluster_key=str(tmp_path / "key"),
    )
    config = replace(make_config(str(tmp_path)), parallel=parallel)
    with zmq.Context() as context, zmq.Context() as of_node:
        told: list[str] = []
        nodes = Nodes(context, config, told.append)
        node: Peer[NodeCommand] = Peer(of_node, parallel.node_address, b"node", NodeCommand, key)

        def hears(condition: Callable[[], Any]) -> bool:
            return eventually(lambda: [*nodes.read_reports()] or condition())

        assert hears(lambda: isinstance(node.receive(), NodeWelcome))
        node.send(ProcessStarted("worker 1", 1, 7))
        node.socket.send(b"\xc1garbage")
        assert hears(lambda: nodes.num_dropped_frames == 2)
        node.send(NodeHello(PROTOCOL_VERSION, 1, 2, "host"))
        assert hears(lambda: told == ["node 1 has joined: host"])
        for count in (3, 0, 1):
            node.send(NodePing(count))
        assert hears(lambda: nodes.num_dropped_frames == 6)
        node.close()
        nodes.close("")
