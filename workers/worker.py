"""A worker process, which owns one shard of the model and executes its core's steps in order.

A worker survives its core. The next core greets it, and finds the model loaded and the KV cache filled.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from ..protocol.arrays import int32_view
from ..protocol.cluster_key import cluster_key_of
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.errors import EngineError
from ..protocol.heartbeat import Pulse
from ..protocol.process import return_free_memory
from ..protocol.step_log import read_steps
from ..protocol.supervisor_messages import Stage
from ..protocol.transport import Peer, StatusReporter
from ..protocol.worker_messages import (
    AllocateKVCache,
    CoreHello,
    GrammarOutput,
    KVConnectorReport,
    LoraLoaded,
    ModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    WorkerCommand,
    WorkerHello,
    WorkerMemory,
    WorkerReady,
)
from .execution.device_watch import DeviceWatch
from .execution.factory import Runner, open_runner
from .execution.runner import PendingOutput, StepResult
from .kv_transfer.connector import KVConnector
from .models.lora.lora_loader import LoraLoader

LOADING_INTERVAL_S: Final = 0.1
"""Seconds between reports of the weights that are loaded. One for each matrix would keep the supervisor busy."""


class Worker:
    """Loads the model, then executes the commands of one core after another until `Shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        core_index: int,
        rank: int,
        context: zmq.Context[Any],
        status: StatusReporter,
        pulse: Pulse,
    ) -> None:
        self._config = config
        self._core_index = core_index
        self._rank = rank
        self._status = status
        self._pulse = pulse
        self._core: Peer[WorkerCommand] = Peer(
            context,
            config.worker_address(core_index),
            b"worker%d" % rank,
            WorkerCommand,
            cluster_key_of(config),
        )
        pulse.count_dropped_frames = lambda: self._core.num_dropped_frames
        self._is_output_rank = rank == config.parallel.output_rank
        self._received: deque[WorkerCommand] = deque()
        # Steps that have started and have no output yet.
        self._computing: deque[PendingOutput] = deque()
        self._device = DeviceWatch()
        self._poller = zmq.Poller()
        self._poller.register(self._core.socket, zmq.POLLIN)
        self._poller.register(self._device.fd, zmq.POLLIN)
        self._invitations_fd: int | None = None
        self._join_rounds: Callable[[], None] = lambda: None
        self._reported_loading = -math.inf
        self._next_step = 0
        self._epoch = 0
        self._step_log_path = config.step_log_path(core_index)
        self._loras: LoraLoader | None = None
        self._connector: KVConnector | None = None

    def run(self) -> None:
        """Load the model and execute commands."""
        opened = open_runner(self._config, self._core_index, self._rank, self._report_loading)
        with opened as (runner, memory):
            if runner.loras is not None:
                self._loras = runner.loras
                self._poller.register(self._loras.fd, zmq.POLLIN)
            self._execute_commands(runner, memory)

    def _execute_commands(self, runner: Runner, memory: WorkerMemory) -> None:
        self._status.report(Stage.WARMING)
        self._invitations_fd, self._join_rounds = runner.invitations_fd, runner.join_rounds
        if self._invitations_fd is not None:
            self._poller.register(self._invitations_fd, zmq.POLLIN)
        allocated: AllocateKVCache | None = None
        while not isinstance(command := self._receive(), Shutdown):
            if isinstance(command, SchedulerOutput):
                if command.step != self._next_step:
                    # This is a step of the previous core, which is obsolete.
                    continue
                self._next_step += 1
                self._pulse.begin_step()
                self._inject_crash(command)
                self._send_or_defer(runner.execute(command, self._await_grammar))
            elif isinstance(command, CoreHello):
                self._catch_up(runner)
                if self._computing:
                    self._computing.clear()
                    self._pulse.end_step()
                self._next_step, self._epoch = 0, command.epoch
                self._core.send(WorkerHello(PROTOCOL_VERSION, command.epoch, self._rank))
                self._core.send(memory)
            elif isinstance(command, AllocateKVCache):
                if allocated is None:
                    allocated = command
                    runner.allocate_kv_cache(command.num_blocks, command.num_host_blocks)
                    if runner.connector is not None:
                        self._connector = runner.connector
                        self._poller.register(self._connector.fd, zmq.POLLIN)
                    runner.warm_up()
                    # Without freezing, a garbage collection would traverse all of torch and delay a step by 0.1 s.
                    return_free_memory()
                    gc.freeze()
                    gc.enable()
                    memory = msgspec.structs.replace(
                        memory,
                        num_blocks=command.num_blocks,
                        num_host_blocks=command.num_host_blocks,
                    )
                elif allocated != command:
                    raise EngineError(
                        f"the core requests {command.num_blocks} KV-cache blocks, but only "
                        f"{allocated.num_blocks} are allocated"
                    )
                self._next_step = 1
                held = runner.release_requests()
                if self._connector is not None:
                    self._connector.epoch = self._epoch
                    with self._pulse.watching():
                        self._connector.reset()
                self._core.send(WorkerReady(self._rank, held))
                self._status.report(Stage.READY)
        runner.close()

    def _catch_up(self, runner: Runner) -> None:
        """Execute the last steps of an exited core, in which other workers may be waiting for this one."""
        if self._step_log_path is None or not self._next_step:
            return
        for step in read_steps(self._step_log_path, self._epoch, self._next_step):
            self._pulse.begin_step()
            runner.execute(step, lambda step: None)
            self._pulse.end_step()

    def _inject_crash(self, step: SchedulerOutput) -> None:
        """If the step contains the token for which tests inject crashes, crash like a fault in native code."""
        token_id = self._config.recovery.inject_crash
        if token_id is not None and any(
            token_id in int32_view(new.token_ids) for new in step.new_requests
        ):
            os.kill(os.getpid(), signal.SIGSEGV)

    def _send_or_defer(self, result: StepResult) -> None:
        """Send the output of the step that just started, or keep it until it is ready."""
        if not isinstance(result, ModelRunnerOutput):
            self._computing.append(result)
            return
        # Outputs must be sent in the order of the steps.
        self._send_computed()
        self._send(result)

    def _send(self, output: ModelRunnerOutput) -> None:
        if self._is_output_rank:
            self._core.send(output)
        self._pulse.end_step()
        if self._computing:
            self._pulse.begin_step()

    def _send_computed(self) -> None:
        """Wait for all steps that have started, and send their outputs."""
        while self._computing:
            self._send(self._computing.popleft().output())

    def _receive(self) -> WorkerCommand:
        """Return the next command. While waiting, send outputs as they become ready.

        All waiting commands are received together, because the greeting of a new core invalidates all commands before
        it.
        """
        while True:
            while self._computing and self._computing[0].is_ready():
                self._send(self._computing.popleft().output())
            is_loading = self._loras is not None and self._report_loras(self._loras)
            if self._connector is not None:
                self._report_transfers(self._connector)
            is_idle = not self._received and not self._computing and not is_loading
            may_block = self._invitations_fd is None and self._connector is None
            command = self._core.receive(block=is_idle and may_block)
            while command is not None:
                self._enqueue(command)
                command = self._core.receive()
            if self._received:
                return self._received.popleft()
            if self._computing:
                self._device.watch_output(self._computing[0])
            self._wait()

    def _wait(self) -> None:
        """Sleep until a command or an output arrives.

        Meanwhile, compute experts for other replicas if they ask for it.
        """
        readable = dict(self._poller.poll())
        if self._device.fd in readable:
            self._device.clear()
        if self._invitations_fd in readable:
            self._join_rounds()

    def _report_loras(self, loras: LoraLoader) -> bool:
        """Report the LoRA adapters that have been loaded. Return whether others are still being loaded."""
        for number, error in loras.take_answers():
            self._core.send(LoraLoaded(self._rank, number, error))
        return loras.is_loading

    def _report_transfers(self, connector: KVConnector) -> None:
        """Send the reports of the KV connector, once a core has greeted this worker and can receive them."""
        if self._next_step:
            with self._pulse.watching():
                reports = connector.take_reports()
            for output in reports:
                self._core.send(KVConnectorReport(self._rank, output))

    def _enqueue(self, command: WorkerCommand) -> None:
        if isinstance(command, CoreHello):
            self._received.clear()
        self._received.append(command)

    def _await_grammar(self, step: int) -> GrammarOutput | None:
        """Wait for the bitmasks of `step`. Return None if the core shuts down or is replaced first."""
        # The core computes the bitmasks after it has received the tokens of earlier steps.
        self._send_computed()
        while True:
            for command in self._received:
                if isinstance(command, GrammarOutput) and command.step == step:
                    self._received.remove(command)
                    return command
                if isinstance(command, Shutdown | CoreHello):
                    return None
            received = self._core.receive()
            if received is not None:
                self._enqueue(received)
            else:
                self._wait()

    def _report_loading(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now > self._reported_loading + LOADING_INTERVAL_S:
            self._reported_loading = now
            self._status.report(Stage.LOADING, "weights", done, total)
