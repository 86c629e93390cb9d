"""A worker process: it executes the steps of its core, in order, and owns one shard of the model."""

from __future__ import annotations

import gc
import logging
from collections import deque
from typing import Any

import zmq

from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.errors import EngineError
from ..protocol.messages import (
    AllocateKVCache,
    GrammarOutput,
    SchedulerOutput,
    Shutdown,
    Stage,
    WorkerCommand,
    WorkerHello,
    WorkerMemory,
    WorkerReady,
)
from ..protocol.transport import Peer, StatusReporter
from .device import open_device
from .loaders import open_checkpoint
from .memory import count_host_blocks, count_kv_blocks
from .model_runner import ModelRunner
from .parallel_state import explaining_lost_workers, join_replica, leave_replica

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, sizes the KV cache, then answers every `SchedulerOutput` until `Shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        core_index: int,
        rank: int,
        context: zmq.Context[Any],
        status: StatusReporter,
    ) -> None:
        self._config = config
        self._core_index = core_index
        self._rank = rank
        self._status = status
        self._core: Peer[WorkerCommand] = Peer(
            context, config.worker_address(core_index), b"worker%d" % rank, WorkerCommand
        )
        self._pending: deque[WorkerCommand] = deque()

    def run(self) -> None:
        with explaining_lost_workers():
            self._run()

    def _run(self) -> None:
        config = self._config
        self._core.send(WorkerHello(PROTOCOL_VERSION, config.epoch, self._rank))
        workers_per_core = config.parallel.workers_per_core
        device = open_device(config.device, self._core_index * workers_per_core + self._rank)
        address = config.rendezvous_address(self._core_index)
        parallel = join_replica(address, self._rank, config.parallel, device)
        checkpoint = open_checkpoint(config.model.path)
        runner = ModelRunner(config, device, checkpoint, self._report_loading, parallel)
        if workers_per_core > 1:
            logger.info("read %.1f MB of the model's weights", checkpoint.bytes_read / 1e6)
        # Its memory map would count as this process's memory.
        del checkpoint
        num_blocks = count_kv_blocks(config, device, runner.block_bytes, runner.kv_cache_groups)
        num_host_blocks = count_host_blocks(config.cache, runner.block_bytes)
        self._core.send(
            WorkerMemory(self._rank, num_blocks, runner.kv_cache_groups, num_host_blocks)
        )
        allocate = self._receive()
        if isinstance(allocate, Shutdown):
            return
        if not isinstance(allocate, AllocateKVCache):
            raise EngineError(f"expected AllocateKVCache, got {type(allocate).__name__}")
        runner.allocate_kv_cache(allocate.num_blocks, allocate.num_host_blocks)
        self._status.report(Stage.WARMING)
        runner.warm_up()
        # A collection that looked at all of torch would hold up a step for a tenth of a second.
        gc.freeze()
        gc.enable()
        self._core.send(WorkerReady(self._rank))
        self._status.report(Stage.READY)
        self._execute_steps(runner, answers=parallel.is_output_rank)
        runner.close()
        leave_replica()

    def _execute_steps(self, runner: ModelRunner, *, answers: bool) -> None:
        while not isinstance(command := self._receive(), Shutdown):
            if isinstance(command, SchedulerOutput):
                result = runner.execute(command, self._await_grammar)
                if answers:
                    self._core.send(result)

    def _receive(self) -> WorkerCommand:
        if self._pending:
            return self._pending.popleft()
        command = self._core.receive(block=True)
        assert command is not None
        return command

    def _await_grammar(self, step: int) -> GrammarOutput | None:
        """The bitmasks of `step`; None when the core shuts down instead."""
        for command in self._pending:
            if isinstance(command, GrammarOutput) and command.step == step:
                self._pending.remove(command)
                return command
        while True:
            received = self._core.receive(block=True)
            assert received is not None
            if isinstance(received, GrammarOutput) and received.step == step:
                return received
            self._pending.append(received)
            if isinstance(received, Shutdown):
                return None

    def _report_loading(self, done: int, total: int) -> None:
        self._status.report(Stage.LOADING, "weights", done, total)
