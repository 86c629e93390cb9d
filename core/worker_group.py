"""The workers of one replica, as their core talks to them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from ..protocol.cluster_key import cluster_key_of
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.errors import EngineError
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.messages import (
    AllocateKVCache,
    CoreHello,
    DraftTokenIds,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerHello,
    WorkerMemory,
    WorkerMessage,
    WorkerReady,
)
from ..protocol.process import StopSignal
from ..protocol.step_log import StepLog
from ..protocol.transport import Hub, encode
from .message_checks import is_sound_held

logger = logging.getLogger(__name__)

_STEP_RESULTS: Final = (ModelRunnerOutput, DraftTokenIds)


class WorkerGroup:
    """Greets the workers, has them allocate the KV cache, then sends all of them every step.

    What a worker sends before it has answered the greeting of this epoch was meant for an earlier core, and is dropped.
    """

    def __init__(self, context: zmq.Context[Any], config: EngineConfig, core_index: int) -> None:
        self._config = config
        self._hub: Hub[WorkerMessage] = Hub(
            context, config.worker_address(core_index), WorkerMessage, cluster_key_of(config)
        )
        self.socket = self._hub.socket
        self._identities: list[bytes] = []
        self._output_worker = b""
        self.held: list[HeldRequest] = []
        """What the KV cache has of the requests of an earlier core."""
        self._core_index = core_index
        self._num_workers = config.parallel.workers_per_core
        self._memories: dict[bytes, WorkerMemory] = {}
        self._memory: WorkerMemory | None = None
        """What all workers have, once each has told it."""
        self._ready: set[bytes] = set()
        """The workers that have their KV cache."""
        self._step_log: StepLog | None = None
        self._has_missed_steps = False

    @property
    def num_dropped_frames(self) -> int:
        return self._hub.num_dropped_frames

    def drop_frame(self) -> None:
        """Count a message that makes no sense."""
        self._hub.num_dropped_frames += 1

    def await_kv_cache(self, stop: StopSignal, beat: Callable[[], None]) -> WorkerMemory | None:
        """Wait until every worker has its KV cache. Returns what all of them have, None when told to stop.

        It may take as long as a download, or until a machine joins; `beat` tells meanwhile that this is no hang.
        Raises EngineError on SIGUSR2.
        """
        poller = zmq.Poller()
        poller.register(stop.fd, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)
        while len(self._ready) < self._num_workers and not stop.requested:
            poller.poll(int(BEAT_INTERVAL_S * 1000))
            beat()
            raise_if_worker_lost(stop.take())
            while (received := self._hub.receive()) is not None:
                self._take_greeting(*received)
        if stop.requested:
            return None
        path = self._config.step_log_path(self._core_index)
        if path is not None:
            self._step_log = StepLog(path, self._config.epoch)
        return self._memory

    def _take_greeting(self, identity: bytes, message: WorkerMessage | None) -> None:
        """A worker has connected, or tells how far it is on its way to a KV cache."""
        match message:
            case None:
                # The worker of a lost machine may have answered before another one comes in its place.
                if identity in self._identities:
                    self._identities.remove(identity)
                    self._memories.pop(identity, None)
                    self._ready.discard(identity)
                self._hub.send(identity, CoreHello(PROTOCOL_VERSION, self._config.epoch))
            case WorkerHello() if self._is_welcome(identity, message):
                self._identities.append(identity)
                if message.rank == self._config.parallel.output_rank:
                    self._output_worker = identity
            case _ if identity not in self._identities:
                self.drop_frame()
            case WorkerMemory(rank) | WorkerReady(rank) if identity != _identity(rank):
                self.drop_frame()
            case WorkerMemory():
                self._memories[identity] = message
                if len(self._memories) == self._num_workers:
                    self._memory = memory = _common_memory(list(self._memories.values()))
                    self.send(AllocateKVCache(memory.num_blocks, memory.num_host_blocks))
            case WorkerReady(_, held) if self._may_hold(held):
                self._ready.add(identity)
                self.held = held
            case _:
                self.drop_frame()

    def _is_welcome(self, identity: bytes, hello: WorkerHello) -> bool:
        """Whether a worker answers with the version and epoch of the greeting, under its own name, and once."""
        return (
            (hello.version, hello.epoch) == (PROTOCOL_VERSION, self._config.epoch)
            and 0 <= hello.rank < self._num_workers
            and identity == _identity(hello.rank)
            and identity not in self._identities
        )

    def _may_hold(self, held: list[HeldRequest]) -> bool:
        """Whether a KV cache was asked for, and can hold these requests."""
        memory = self._memory
        if memory is None:
            return False
        limits = memory.num_blocks, len(memory.groups), self._config.cache.block_size
        return all(is_sound_held(request, *limits) for request in held)

    def send(self, message: msgspec.Struct) -> None:
        """To every worker."""
        frame = encode(message)
        if self._step_log is not None and isinstance(message, SchedulerOutput):
            self._write_down(self._step_log, message.step, frame)
        self._hub.send_frame(self._identities, frame)

    def _write_down(self, log: StepLog, step: int, frame: bytes) -> None:
        """Append a step to the log. If the disk is full, the step is missed only if this core dies."""
        try:
            log.append(step, frame)
        except OSError as error:
            if not self._has_missed_steps:
                logger.warning(
                    "steps cannot be written to %s: %s; make room there, or workers may be lost with this core",
                    self._config.run_dir,
                    error.strerror,
                )
            self._has_missed_steps = True

    def receive(self) -> ModelRunnerOutput | DraftTokenIds | None:
        """The one message that a poll has found; None if it is dropped.

        Raises EngineError for a worker that has lost its state.
        """
        received = self._hub.receive_one()
        if received is None:
            return None
        identity, message = received
        if identity == self._output_worker and isinstance(message, _STEP_RESULTS):
            return message
        if message is None and identity in self._identities:
            raise EngineError(
                f"{identity.decode()} has left, and come back with no memory of its steps"
            )
        self.drop_frame()
        return None

    def close(self) -> None:
        self._hub.close()
        if self._step_log is not None:
            self._step_log.close()


def raise_if_worker_lost(signals: set[int]) -> None:
    """Raises EngineError if the supervisor has said so, by SIGUSR2."""
    if signal.SIGUSR2 in signals:
        raise EngineError("a worker of this core is lost")


def _identity(rank: int) -> bytes:
    return b"worker%d" % rank


def _common_memory(memories: list[WorkerMemory]) -> WorkerMemory:
    """The blocks that every worker can hold. Raises EngineError if they have different groups."""
    groups = memories[0].groups
    for memory in memories:
        if memory.groups != groups:
            raise EngineError(
                f"worker {memory.rank} has the KV-cache groups {memory.groups}, "
                f"worker {memories[0].rank} has {groups}"
            )
    return msgspec.structs.replace(
        memories[0],
        num_blocks=min(memory.num_blocks for memory in memories),
        num_host_blocks=min(memory.num_host_blocks for memory in memories),
    )
