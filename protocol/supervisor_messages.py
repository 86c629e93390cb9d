"""Messages from and to the supervisor: processes report, frontends receive the state, nodes run workers.

A node is another machine. It connects, receives a `NodeWelcome` and answers with a `NodeHello`. Then it starts and
signals processes on command, and forwards the reports of its workers. Both sides send a message at least every half
second.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import msgspec

from .config.parallel import ReplicaRole

# any process -> supervisor


class Stage(enum.StrEnum):
    """The stages of a process's life."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class ProcessStatus(msgspec.Struct, tag="status", array_like=True, gc=False, frozen=True):
    """The progress of one process through its stages.

    `process` is its title without the prefix, such as "worker 0". `done` of `total` draws the progress bar, in bytes;
    both are 0 if there is nothing to count. `detail` is one line for people. `pid` distinguishes a process from its
    predecessors.
    """

    process: str
    stage: Stage
    detail: str = ""
    done: int = 0
    total: int = 0
    pid: int = 0


class Heartbeat(msgspec.Struct, tag="beat", array_like=True, gc=False, frozen=True):
    """A sign that a process is alive, whatever it is doing. `busy_s` is how long its current step has taken so far.

    `num_tokens` counts generated tokens. `num_dropped_frames` counts frames that no other message reports: those of a
    worker, and those that a frontend received from the supervisor. The other fields are gauges of a core.
    """

    process: str = ""
    pid: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_dropped_frames: int = 0


class ReplicaAction(enum.StrEnum):
    """An action on a replica; see `ReplicaCommand`."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"
    PREFILL = "prefill"
    DECODE = "decode"


NEW_ROLES: Final = {
    ReplicaAction.PREFILL: ReplicaRole.PREFILL,
    ReplicaAction.DECODE: ReplicaRole.DECODE,
}
"""The role that a replica has after an action."""


class ReplicaCommand(msgspec.Struct, tag="replica", array_like=True, gc=False, frozen=True):
    """A request to the supervisor to change the state of a replica, forwarded by a frontend.

    DRAIN stops new requests to the replica, and UNDRAIN allows them again. RESTART drains the replica, restarts its
    processes when its last request has ended, and then undrains it. PREFILL and DECODE change the role of a replica.
    """

    replica: int
    action: ReplicaAction


class CauseFound(msgspec.Struct, tag="cause", array_like=True, gc=False, frozen=True):
    """A frontend has failed a request as the cause of the last crashes of cores or workers."""


ProcessReport: TypeAlias = ProcessStatus | Heartbeat
"""Reports that every process sends about itself."""

SupervisorMessage: TypeAlias = ProcessReport | ReplicaCommand | CauseFound


# supervisor -> frontends


class ProcessInfo(msgspec.Struct, gc=False):
    """The supervisor's knowledge about one process. `silent_s` is the time since its last heartbeat, in seconds.

    `num_dropped_frames` includes the reports of its predecessors.
    """

    name: str
    pid: int
    stage: Stage
    detail: str
    epoch: int
    num_restarts: int
    silent_s: float
    busy_s: float
    steps_per_s: float
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    replica: int | None = None
    num_dropped_frames: int = 0


class ReplicaState(enum.StrEnum):
    """The state of a replica. Only a SERVING replica gets new requests, even while it is not up yet."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"


class ReplicaInfo(msgspec.Struct, gc=False):
    """One replica. `epoch` counts its lives. `is_up` is set while its core and workers are ready.

    `is_resuming` is set after a crash of the core alone: its streams continue with the next core. `has_ended` is set
    while the core has ended and the next one has not started. `role` is None in an engine without roles.
    """

    replica: int
    state: ReplicaState
    epoch: int
    num_running: int
    num_waiting: int
    is_resuming: bool = False
    is_up: bool = True
    has_ended: bool = False
    role: ReplicaRole | None = None


class EngineStatus(msgspec.Struct, gc=False):
    """Every process of the engine, frontends first, and every replica in order once the engine was ready.

    `num_dropped_frames` counts frames dropped by the supervisor and the nodes. `failure` says, in the last status, why
    the engine cannot continue. `poison_bodies` are digests of request bodies that crashed frontends and are rejected.
    """

    processes: list[ProcessInfo]
    replicas: list[ReplicaInfo] = []
    num_dropped_frames: int = 0
    failure: str = ""
    poison_bodies: list[bytes] = []


# supervisor -> node


class NodeWelcome(msgspec.Struct, tag="welcome", array_like=True, gc=False, frozen=True):
    """The answer to a new connection. The node must end what it ran for an earlier one.

    `config` is an encoded `EngineConfig`, which only a node of the same `version` can decode.
    """

    version: int
    config: bytes


class StartProcess(msgspec.Struct, tag="start", array_like=True, gc=False, frozen=True):
    """Start the worker `name`, which the configuration assigns to this node.

    The replica's workers connect to each other at `master_addr` and `master_port`.
    """

    name: str
    epoch: int
    master_addr: str
    master_port: int


class SignalProcess(msgspec.Struct, tag="signal", array_like=True, gc=False, frozen=True):
    """Send a signal to the process `name`."""

    name: str
    signum: int


class NodePing(msgspec.Struct, tag="ping", array_like=True, gc=False, frozen=True):
    """Keeps the connection alive. `num_dropped_frames` counts frames dropped by a node since its last ping."""

    num_dropped_frames: int = 0


class EndNode(msgspec.Struct, tag="end", array_like=True, gc=False, frozen=True):
    """The engine has stopped, or has failed for the given reason."""

    reason: str = ""


NodeCommand: TypeAlias = NodeWelcome | StartProcess | SignalProcess | NodePing | EndNode


# node -> supervisor


class NodeHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """The answer to `NodeWelcome`. `num_nodes` is the number the node was configured with."""

    version: int
    node_rank: int
    num_nodes: int
    host: str


class ProcessStarted(msgspec.Struct, tag="started", array_like=True, gc=False, frozen=True):
    """A process has started."""

    name: str
    epoch: int
    pid: int


class ProcessExited(msgspec.Struct, tag="exited", array_like=True, gc=False, frozen=True):
    """A process has ended. `returncode` is negative for a signal, as in `subprocess`.

    Without a `pid` the process could not be started.
    """

    name: str
    pid: int
    returncode: int
    reason: str = ""


class NodeLeft(msgspec.Struct, tag="left", array_like=True, gc=False, frozen=True):
    """The node ends; all its processes have ended. `refusal` is why it did not join."""

    refusal: str = ""


NodeMessage: TypeAlias = (
    NodeHello | ProcessStarted | ProcessExited | ProcessStatus | Heartbeat | NodePing | NodeLeft
)
