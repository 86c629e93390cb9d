"""What a supervisor hears from every process, and what it tells the frontends."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

# any process -> supervisor


class Stage(enum.StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class ProcessStatus(msgspec.Struct, tag="status", array_like=True, gc=False, frozen=True):
    """Progress of one process through its stages.

    `process` is its title without the prefix ("worker 0"). `done` of `total` (bytes, or 0 of 0 when there is nothing to
    count) draws the progress bar. `detail` is the one line a person reads. `pid` tells it from its predecessors.
    """

    process: str
    stage: Stage
    detail: str = ""
    done: int = 0
    total: int = 0
    pid: int = 0


class Heartbeat(msgspec.Struct, tag="beat", array_like=True, gc=False, frozen=True):
    """A process is alive, whatever it is doing. `busy_s` says for how long it has been in its present step.

    `num_tokens` counts what it has generated. `num_dropped_frames` are those that no other message tells of: a
    worker's, and a frontend's from the supervisor. The rest are a core's gauges.
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
    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"


class ReplicaCommand(msgspec.Struct, tag="replica", array_like=True, gc=False, frozen=True):
    """What a frontend was asked to have done to a replica.

    DRAIN lets it get no new requests; RESTART does too, and when the last one has ended all its processes are started
    anew, after which it serves as after UNDRAIN.
    """

    replica: int
    action: ReplicaAction


class CauseFound(msgspec.Struct, tag="cause", array_like=True, gc=False, frozen=True):
    """A frontend has failed a request as the cause of the last deaths of cores or workers."""


ProcessReport: TypeAlias = ProcessStatus | Heartbeat
"""What every process says of itself."""

SupervisorMessage: TypeAlias = ProcessReport | ReplicaCommand | CauseFound


# supervisor -> frontends


class ProcessInfo(msgspec.Struct, gc=False):
    """What the supervisor knows of one process. `silent_s` have passed since its last heartbeat.

    `num_dropped_frames` counts what those before it have told, too.
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
    """New requests go to a replica that is SERVING only, whether it is up or about to be."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"


class ReplicaInfo(msgspec.Struct, gc=False):
    """One replica. `epoch` counts its lives. It `is_up` while its core and workers are ready.

    One that `is_resuming` has lost its core alone, a moment ago: with the next one, streams go on where they were.
    The core of one that `has_ended` is gone, and there is no next one yet.
    """

    replica: int
    state: ReplicaState
    epoch: int
    num_running: int
    num_waiting: int
    is_resuming: bool = False
    is_up: bool = True
    has_ended: bool = False


class EngineStatus(msgspec.Struct, gc=False):
    """Every process of the engine, the frontends first, and every replica in order once the engine was ready.

    `num_dropped_frames` are those that the supervisor and the nodes have dropped. `failure` says why the engine cannot
    go on, in its last status.
    `poison_bodies` are the digests of request bodies that ended frontends and are refused.
    """

    processes: list[ProcessInfo]
    replicas: list[ReplicaInfo] = []
    num_dropped_frames: int = 0
    failure: str = ""
    poison_bodies: list[bytes] = []
