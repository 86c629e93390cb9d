"""The core's connection to the workers of its replica."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from ..protocol.cluster_key import cluster_key_of
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.errors import EngineError, PeerLostError
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.process import StopSignal
from ..protocol.step_log import StepLog
from ..protocol.transport import Hub, encode
from ..protocol.worker_messages import (
    AllocateKVCache,
    CoreHello,
    DraftTokenIds,
    HeldRequest,
    KVConnectorReport,
    LoraLoaded,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerHello,
    WorkerMemory,
    WorkerMessage,
    WorkerReady,
)
from .message_checks import is_valid_held_request

logger = logging.getLogger(__name__)

_STEP_RESULTS: Final = (ModelRunnerOutput, DraftTokenIds)


class WorkerGroup:
    """The workers of one replica: greets them, lets them allocate the KV cache, and sends every step to all of them.

    A worker's messages are dropped until it has answered the greeting of this epoch, because earlier ones were meant
    for a previous core.
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
        """KV-cache blocks that the workers hold for requests of an earlier core."""
        self.early_reports: list[KVConnectorReport] = []
        """Reports of workers that were ready before this core, for example about the blocks that they have on disk."""
        self._core_index = core_index
        self._num_workers = config.parallel.workers_per_core
        self._memories: dict[bytes, WorkerMemory] = {}
        self._memory: WorkerMemory | None = None
        """The memory that is available in every worker, once all have reported theirs."""
        self._ready: set[bytes] = set()
        """Identities of the workers that have allocated their KV cache."""
        self._loras: dict[int, list[LoraLoaded]] = {}
        """Per load number, the answers to a `LoraLoad` that not all workers have answered yet."""
        self._step_log: StepLog | None = None
        self._has_missed_steps = False

    @property
    def num_dropped_frames(self) -> int:
        """Number of invalid messages that were dropped."""
        return self._hub.num_dropped_frames

    def drop_frame(self) -> None:
        """Count a message that is not valid in the current state."""
        self._hub.num_dropped_frames += 1

    def await_kv_cache(self, stop: StopSignal, beat: Callable[[], None]) -> WorkerMemory | None:
        """Wait until every worker has allocated its KV cache.

        This can take as long as a model download, or until another machine joins. `beat` is called meanwhile, so that
        the supervisor does not consider the core hung.

        Returns:
            The memory that is available in every worker, or None if a stop was requested.

        Raises:
            EngineError: The supervisor reported a lost worker, or workers disagree on the KV-cache groups.
        """
        poller = zmq.Poller()
        poller.register(stop.fd, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)
        while len(self._ready) < self._num_workers and not stop.requested:
            poller.poll(int(BEAT_INTERVAL_S * 1000))
            beat()
            raise_if_worker_lost(stop.take_signals())
            while (received := self._hub.receive()) is not None:
                self._handle_startup_message(*received)
        if stop.requested:
            return None
        path = self._config.step_log_path(self._core_index)
        if path is not None:
            self._step_log = StepLog(path, self._config.epoch)
        return self._memory

    def _handle_startup_message(self, identity: bytes, message: WorkerMessage | None) -> None:
        """Handle a new connection (`message` is None), or a worker's report before all workers have a KV cache."""
        match message:
            case None:
                # A worker of a lost machine may have answered before its replacement connects.
                if identity in self._identities:
                    self._identities.remove(identity)
                    self._memories.pop(identity, None)
                    self._ready.discard(identity)
                    self.early_reports = [
                        report
                        for report in self.early_reports
                        if identity != _identity(report.rank)
                    ]
                self._hub.send(identity, CoreHello(PROTOCOL_VERSION, self._config.epoch))
            case WorkerHello() if self._is_valid_hello(identity, message):
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
            case WorkerReady(_, held) if self._can_hold(held):
                self._ready.add(identity)
                self.held = held
            case KVConnectorReport(rank) if identity in self._ready and identity == _identity(rank):
                self.early_reports.append(message)
            case _:
                self.drop_frame()

    def _is_valid_hello(self, identity: bytes, hello: WorkerHello) -> bool:
        """Return whether this is a worker's first hello, sent under its own identity, with this version and epoch."""
        return (
            (hello.version, hello.epoch) == (PROTOCOL_VERSION, self._config.epoch)
            and 0 <= hello.rank < self._num_workers
            and identity == _identity(hello.rank)
            and identity not in self._identities
        )

    def _can_hold(self, held: list[HeldRequest]) -> bool:
        """Return whether the blocks of all these requests exist in the KV cache that the workers allocate."""
        memory = self._memory
        if memory is None:
            return False
        limits = memory.num_blocks, len(memory.groups), self._config.cache.block_size
        return all(is_valid_held_request(request, *limits) for request in held)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to every worker. Steps are also appended to the step log."""
        frame = encode(message)
        if self._step_log is not None and isinstance(message, SchedulerOutput):
            self._log_step(self._step_log, message.step, frame)
        self._hub.send_frame(self._identities, frame)

    def _log_step(self, log: StepLog, step: int, frame: bytes) -> None:
        """Append a step to the log.

        If the disk is full, continue, because the step is needed only if this core crashes.
        """
        try:
            log.append(step, frame)
        except OSError as error:
            if not self._has_missed_steps:
                logger.warning(
                    "steps cannot be written to %s: %s; free some space, or workers may have to restart "
                    "with this core",
                    self._config.run_dir,
                    error.strerror,
                )
            self._has_missed_steps = True

    def receive(
        self,
    ) -> ModelRunnerOutput | DraftTokenIds | LoraLoaded | KVConnectorReport | None:
        """Receive the message that a poll has reported. Return None if it was dropped.

        The answers of all workers to a `LoraLoad` are combined into one, with the first error.

        Raises:
            EngineError: A worker has restarted, so it has lost its state.
        """
        received = self._hub.receive_one()
        if received is None:
            return None
        identity, message = received
        if identity == self._output_worker and isinstance(message, _STEP_RESULTS):
            return message
        if isinstance(message, LoraLoaded) and identity == _identity(message.rank):
            return self._collect_lora_answer(message)
        if (
            isinstance(message, KVConnectorReport)
            and identity == _identity(message.rank)
            and identity in self._identities
        ):
            return message
        if message is None and identity in self._identities:
            raise EngineError(
                f"{identity.decode()} reconnected without the state from its earlier steps"
            )
        self.drop_frame()
        return None

    def _collect_lora_answer(self, answer: LoraLoaded) -> LoraLoaded | None:
        """Return the combined answer of all workers, or None while some have not answered."""
        answers = self._loras.setdefault(answer.number, [])
        answers.append(answer)
        if len(answers) < self._num_workers:
            return None
        del self._loras[answer.number]
        return next((each for each in answers if each.error), answer)

    def close(self) -> None:
        """Close the socket and the step log."""
        self._hub.close()
        if self._step_log is not None:
            self._step_log.close()


def raise_if_worker_lost(signals: set[int]) -> None:
    """Raise an error if the supervisor reported a lost worker by a signal.

    Raises:
        EngineError: The core lost a worker (SIGUSR2).
        PeerLostError: Another core lost a worker that holds some of the experts (SIGALRM).
    """
    if signal.SIGUSR2 in signals:
        raise EngineError("the core lost a worker")
    if signal.SIGALRM in signals:
        raise PeerLostError("another replica lost a worker that computes some of the experts")


def _identity(rank: int) -> bytes:
    return b"worker%d" % rank


def _common_memory(memories: list[WorkerMemory]) -> WorkerMemory:
    """Return the smallest number of blocks and the total number of CPU cores of the workers.

    Raises:
        EngineError: The KV-cache groups of the workers differ.
    """
    groups = memories[0].groups
    for memory in memories:
        if memory.groups != groups:
            raise EngineError(
                f"worker {memory.rank} has other KV-cache groups than worker {memories[0].rank}: "
                f"{memory.groups} and {groups}; use the same model and version on all machines"
            )
    return msgspec.structs.replace(
        memories[0],
        num_blocks=min(memory.num_blocks for memory in memories),
        num_host_blocks=min(memory.num_host_blocks for memory in memories),
        num_cores=sum(memory.num_cores for memory in memories),
    )
