"""Messages between a worker process and successive cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import (
    PROTOCOL_VERSION,
    Device,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.protocol.heartbeat import HeartbeatReader
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.transport import Hub
from engine.protocol.worker_messages import (
    AllocateKVCache,
    CoreHello,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    Shutdown,
    WorkerHello,
    WorkerMemory,
    WorkerMessage,
    WorkerReady,
)
from support.processes.waiting import eventually

pytestmark = pytest.mark.slow

WORKER = b"worker0"
TIMEOUT_MS = 20_000


class Core:
    """A core whose messages to the worker a test chooses."""

    def __init__(self, context: zmq.Context, config: EngineConfig, epoch: int) -> None:
        self.hub: Hub[WorkerMessage] = Hub(context, config.worker_address(0), WorkerMessage)
        assert self.receive() is None, "the worker probes"
        self.send(CoreHello(PROTOCOL_VERSION, epoch))
        assert self.receive() == WorkerHello(PROTOCOL_VERSION, epoch, 0)
        memory = self.receive()
        assert isinstance(memory, WorkerMemory)
        self._num_blocks = memory.num_blocks

    def allocate(self) -> None:
        self.send(AllocateKVCache(self._num_blocks))
        assert self.receive() == WorkerReady(0)

    def send(self, message: object) -> None:
        self.hub.send(WORKER, message)

    def receive(self) -> WorkerMessage | None:
        assert self.hub.socket.poll(TIMEOUT_MS), "the worker is silent"
        received = self.hub.receive()
        assert received is not None and received[0] == WORKER
        return received[1]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        str(tmp_path),
        1,
        ModelConfig("m", "/m", "/m", ("m",), "llama", 32, 64, (0,)),
        scheduler=SchedulerConfig(max_num_seqs=4),
        device=DeviceConfig(Device.NULL, null_step_ms=1.0),
    )


@pytest.fixture
def worker(config: EngineConfig) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, "-P", "-m", "engine.workers", str(config.save()), "0", "0", "1")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def first_step(number: int) -> SchedulerOutput:
    new = NewRequestData(
        0, (0, 0), int32_bytes([5, 6]), 2, 0, (int32_bytes([1]),), SamplingParams(seed=1)
    )
    slots, chunks = int32_bytes([0]), int32_bytes([(0, 2)])
    return SchedulerOutput(number, new_requests=[new], slots=slots, chunks=chunks)


def test_steps_of_the_previous_core_are_dropped(
    worker: subprocess.Popen[bytes], config: EngineConfig
) -> None:
    with zmq.Context() as context:
        core = Core(context, config, 1)
        core.allocate()
        for step in (first_step(1), SchedulerOutput(2)):
            core.send(step)
            answer = core.receive()
            assert isinstance(answer, ModelRunnerOutput) and answer.step == step.step
        core.hub.close()

        core = Core(context, config, 2)
        core.send(SchedulerOutput(3))
        core.allocate()
        core.send(SchedulerOutput(3))
        core.send(first_step(1))
        answer = core.receive()
        assert isinstance(answer, ModelRunnerOutput) and answer.step == 1
        core.send(Shutdown())
        assert worker.wait(TIMEOUT_MS / 1000) == 0
        core.hub.close()


def test_malformed_frames_are_dropped_and_counted(
    worker: subprocess.Popen[bytes], config: EngineConfig
) -> None:
    with zmq.Context() as context:
        heartbeats = HeartbeatReader(config, ["worker 0"])
        core = Core(context, config, 1)
        core.hub.send_frame((WORKER,), b"\xc1")
        core.hub.send_frame((WORKER,), b"\xc1garbage")
        core.allocate()
        assert eventually(
            lambda: any(beat.num_dropped_frames == 2 for beat, _ in heartbeats.read())
        )
        core.send(Shutdown())
        assert worker.wait(TIMEOUT_MS / 1000) == 0
        core.hub.close()
        heartbeats.close()
