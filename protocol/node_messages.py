"""Messages between the supervisor and the other nodes, which run workers for it.

A node connects, is welcomed, and introduces itself. Then it starts and kills the processes it is told to, and passes on
what its workers report. Both sides send something at least every half second.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .supervisor_messages import Heartbeat, ProcessStatus

# supervisor -> node


class NodeWelcome(msgspec.Struct, tag="welcome", array_like=True, gc=False, frozen=True):
    """The answer to a new connection. What the node has run for an earlier one must end.

    `config` is an encoded `EngineConfig`, which only a node of the same `version` reads.
    """

    version: int
    config: bytes


class StartProcess(msgspec.Struct, tag="start", array_like=True, gc=False, frozen=True):
    """`name` is a worker that the configuration gives to this node. The replica's workers meet at `master_addr`."""

    name: str
    epoch: int
    master_addr: str
    master_port: int


class SignalProcess(msgspec.Struct, tag="signal", array_like=True, gc=False, frozen=True):
    name: str
    signum: int


class NodePing(msgspec.Struct, tag="ping", array_like=True, gc=False, frozen=True):
    """The connection is alive. A node has dropped `num_dropped_frames` since its last ping."""

    num_dropped_frames: int = 0


class EndNode(msgspec.Struct, tag="end", array_like=True, gc=False, frozen=True):
    """The engine has stopped, or failed for the reason given."""

    reason: str = ""


NodeCommand: TypeAlias = NodeWelcome | StartProcess | SignalProcess | NodePing | EndNode


# node -> supervisor


class NodeHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """Answer to `NodeWelcome`. `num_nodes` is what the node was told."""

    version: int
    node_rank: int
    num_nodes: int
    host: str


class ProcessStarted(msgspec.Struct, tag="started", array_like=True, gc=False, frozen=True):
    name: str
    epoch: int
    pid: int


class ProcessExited(msgspec.Struct, tag="exited", array_like=True, gc=False, frozen=True):
    """`returncode` is negative for a signal, as subprocess has it. A process without a `pid` could not be started."""

    name: str
    pid: int
    returncode: int
    reason: str = ""


class NodeLeft(msgspec.Struct, tag="left", array_like=True, gc=False, frozen=True):
    """The node ends, and what it ran has ended."""


NodeMessage: TypeAlias = (
    NodeHello | ProcessStarted | ProcessExited | ProcessStatus | Heartbeat | NodePing | NodeLeft
)
