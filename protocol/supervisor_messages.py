"""Messages to and from the supervisor. Processes report to it, frontends read its state, and nodes run its workers.

A node is another machine. It connects, receives a `NodeWelcome` and answers with a `NodeHello`. Then it starts and
signals processes on command, and forwards the reports of its workers. Both sides send a message at least every half
second.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import msgspec

from .config.parallel import ReplicaRole
from .config.weights import ReplacedWeights

# Any process -> supervisor


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

    `process` is its process title without the prefix, such as "worker 0". `done` and `total` are the state of the
    progress bar in bytes; both are 0 if there is nothing to count. `detail` is one line of text for people. `pid`
    distinguishes a process from its predecessors.
    """

    process: str
    stage: Stage
    detail: str = ""
    done: int = 0
    total: int = 0
    pid: int = 0


class Heartbeat(msgspec.Struct, tag="beat", array_like=True, gc=False, frozen=True):
    """A periodic message that shows that a process is running, even during a long step; see `heartbeat`.

    `busy_s` is how long its current step has taken so far, in seconds. `num_tokens` counts generated tokens.
    `num_dropped_frames` counts dropped frames that no other message reports: those of a worker, and those that a
    frontend received from the supervisor. `is_ready` repeats the last stage, because a supervisor that crashes loses
    the report of it. The other fields are gauges of a core.
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
    is_ready: bool = False


class ReplicaAction(enum.StrEnum):
    """An action on a replica; see `ReplicaCommand`."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"
    PREFILL = "prefill"
    DECODE = "decode"
    SLEEP = "sleep"
    WAKE = "wake"
    UNLOAD = "unload"


NEW_ROLES: Final = {
    ReplicaAction.PREFILL: ReplicaRole.PREFILL,
    ReplicaAction.DECODE: ReplicaRole.DECODE,
}
"""The role of a replica after each action that changes it."""


class ReplicaCommand(msgspec.Struct, tag="replica", array_like=True, gc=False, frozen=True):
    """A request to the supervisor to change the state of a replica, forwarded by a frontend.

    DRAIN stops new requests to the replica, and UNDRAIN allows them again. RESTART drains the replica, restarts its
    processes when its last request has ended, and then undrains it. PREFILL and DECODE change the role of a replica.
    SLEEP stops its processes and WAKE starts them again; replicas that divide the experts of a model do so together.
    UNLOAD lets all replicas sleep until the next request, if they are idle within seconds.
    """

    replica: int
    action: ReplicaAction

    def __str__(self) -> str:
        return f"replica {self.replica}: {self.action}"


class UpdateWeights(msgspec.Struct, tag="weights", array_like=True, gc=False, frozen=True):
    """A request to the supervisor to restart all replicas with other weights, forwarded by a frontend."""

    weights: ReplacedWeights

    def __str__(self) -> str:
        return f"all replicas load the weights of {self.weights.path}"


class CauseFound(msgspec.Struct, tag="cause", array_like=True, gc=False, frozen=True):
    """Reports that a frontend has failed a request because it caused the last crashes of cores or workers."""


SupervisorMessage: TypeAlias = ProcessStatus | ReplicaCommand | UpdateWeights | CauseFound


# Supervisor -> frontends


class ProcessInfo(msgspec.Struct, gc=False):
    """The supervisor's information about one process. `silent_s` is the time since its last heartbeat, in seconds.

    `num_dropped_frames` includes the frames that its predecessors reported.
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
    """The state of a replica. New requests go only to a SERVING replica, even if its processes are not ready yet.

    The processes of a SLEEPING replica stop and stay stopped. They start again when it is WAKING.
    """

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"
    SLEEPING = "sleeping"
    WAKING = "waking"


class ReplicaInfo(msgspec.Struct, gc=False):
    """One replica. `epoch` counts the starts of its core.

    `is_up` is set while its core and workers are ready. `is_resuming` is set after a crash of the core alone: its
    streams continue with the next core. `has_ended` is set while the core has exited and the next one has not started;
    in a SLEEPING replica, once all processes have exited. `role` is None in an engine without roles.
    `wakes_on_request` is set while it sleeps only because no request came.
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
    wakes_on_request: bool = False


class StatusChanged(msgspec.Struct, tag="changed", array_like=True, gc=False, frozen=True):
    """Reports that there is another `EngineStatus`, which frontends apply immediately."""


class EngineStatus(msgspec.Struct, gc=False):
    """The state of the engine: its processes, frontends first, and its replicas in order once the engine was ready.

    `num_dropped_frames` counts frames dropped by the supervisor and the nodes. `failure` is set in the last status and
    says why the engine cannot continue. `poison_bodies` are digests of request bodies that crashed frontends and are
    rejected.
    """

    processes: list[ProcessInfo]
    replicas: list[ReplicaInfo] = []
    num_dropped_frames: int = 0
    failure: str = ""
    poison_bodies: list[bytes] = []


# Supervisor -> node


class NodeWelcome(msgspec.Struct, tag="welcome", array_like=True, gc=False, frozen=True):
    """The answer to a new connection. The node must stop the processes that it ran for an earlier one.

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
    """The engine has stopped, or has failed for the given reason, so the node must exit."""

    reason: str = ""


NodeCommand: TypeAlias = NodeWelcome | StartProcess | SignalProcess | NodePing | EndNode


# Node -> supervisor


class NodeHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """The answer to `NodeWelcome`. `num_nodes` is the number of machines with which the node was configured."""

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
    """A process has exited. `returncode` is negative for a signal, as in `subprocess`.

    If `pid` is missing, the process could not be started.
    """

    name: str
    pid: int
    returncode: int
    reason: str = ""


class NodeLeft(msgspec.Struct, tag="left", array_like=True, gc=False, frozen=True):
    """The node exits, after all its processes. `refusal` says why it did not join, if it did not."""

    refusal: str = ""


NodeMessage: TypeAlias = (
    NodeHello | ProcessStarted | ProcessExited | ProcessStatus | Heartbeat | NodePing | NodeLeft
)
