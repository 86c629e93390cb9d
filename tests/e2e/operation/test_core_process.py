"""A real core process, for which the test acts as supervisor, worker and client."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine.core.replay.__main__ import main as replay
from engine.core.replay.dump import SUFFIX, read_dump
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import (
    PROTOCOL_VERSION,
    CacheConfig,
    EngineConfig,
    FrontendConfig,
    KVEventsConfig,
    RecoveryConfig,
)
from engine.protocol.heartbeat import HeartbeatReader
from engine.protocol.messages import (
    AddRequests,
    ClientHello,
    CoreMessage,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    ReplicaLost,
)
from engine.protocol.process import STOP_PROCESS
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.supervisor_messages import ProcessStatus, Stage
from engine.protocol.transport import Peer, StatusReceiver
from engine.protocol.worker_messages import (
    AllocateKVCache,
    CoreHello,
    HeldRequest,
    ModelRunnerOutput,
    RowLogprobs,
    SchedulerOutput,
    WorkerCommand,
    WorkerHello,
    WorkerMemory,
    WorkerReady,
)
from support.processes.waiting import eventually
from support.servers.engine_fixtures import engine_config

SABOTAGE = """
import sys
from engine.core.__main__ import main
from engine.core.kv_cache.block_pool import BlockPool
from engine.core.scheduler import scheduler

scheduler.INVARIANT_CHECK_INTERVAL = 5
count = BlockPool.num_free.fget
BlockPool.num_free = property(lambda pool: count(pool) - 1)
sys.exit(main(sys.argv[1], 0, int(sys.argv[2])))
"""
"""A core that counts one free block less than there is, and checks its invariants every 5 steps."""

SMALL_FRAMES = """
import sys
from engine.core.__main__ import main
from engine.core.engine_core import EngineCore
from engine.protocol import transport

def serve(core, serve=EngineCore._serve):
    transport.MAX_FRAME_BYTES = 20_000
    serve(core)

EngineCore._serve = serve
sys.exit(main(sys.argv[1], 0, int(sys.argv[2])))
"""
"""A core that sends no message beyond 20 kB, and takes them."""

TIMEOUT_S = 20.0

HONEST = SABOTAGE.replace("count(pool) - 1", "count(pool)")


def await_message(peer: Peer[Any], kind: type) -> Any:
    """Receive messages until one with this type arrives."""
    deadline = time.monotonic() + TIMEOUT_S
    while not isinstance(message := peer.receive(), kind):
        assert time.monotonic() < deadline, f"no {kind.__name__}"
        peer.socket.poll(100)
    return message


class CoreProcess:
    """The core process and the peers of its sockets."""

    def __init__(self, config: EngineConfig, program: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.statuses = StatusReceiver(self.context, config)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(config.save()), str(config.epoch)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.worker: Peer[WorkerCommand] = Peer(
            self.context, config.worker_address(0), b"worker0", WorkerCommand
        )
        self.client: Peer[CoreMessage] = Peer(
            self.context, config.core_address(0), b"client0", CoreMessage
        )
        self._epoch = config.epoch

    def await_stage(self, stage: Stage) -> ProcessStatus:
        while True:
            status = self.statuses.receive(20_000)
            assert status is not None, "the core says nothing"
            if isinstance(status, ProcessStatus) and status.stage is stage:
                return status

    def start(self) -> None:
        await_message(self.worker, CoreHello)
        self.answer_greeting()
        self.client.send(ClientHello(PROTOCOL_VERSION, self._epoch, 0))

    def answer_greeting(self, held: list[HeldRequest] | None = None) -> None:
        """Answer the greeting as a worker that still has the `held` requests."""
        self.worker.send(WorkerHello(PROTOCOL_VERSION, self._epoch, 0))
        self.worker.send(WorkerMemory(0, 64))
        await_message(self.worker, AllocateKVCache)
        self.worker.send(WorkerReady(0, held or []))
        self.await_stage(Stage.READY)
        await_message(self.client, CoreReady)

    def generate(self, num_tokens: int) -> list[EngineCoreOutputs]:
        """Return the outputs of one request that the client receives."""
        params = SamplingParams(max_tokens=num_tokens)
        request = EngineCoreRequest(0, int32_bytes([1, 2, 3]), params, 0.0)
        self.client.send(AddRequests([request]))
        received: list[EngineCoreOutputs] = []
        num_rows = 0
        deadline = time.monotonic() + TIMEOUT_S
        while not received or not received[-1].finished_set:
            assert time.monotonic() < deadline, "the request does not end"
            if self.worker.socket.poll(5) and isinstance(
                step := self.worker.receive(), SchedulerOutput
            ):
                num_rows = num_rows if step.slots is None else len(step.slots) // 4
                self.worker.send(ModelRunnerOutput(step.step, int32_bytes([7] * num_rows)))
            if isinstance(message := self.client.receive(), EngineCoreOutputs):
                received.append(message)
        return received

    def stop(self) -> str:
        """Stop the process and return its log."""
        self.process.send_signal(STOP_PROCESS)
        log = self.process.communicate(timeout=20)[1]
        for end in (self.worker, self.client, self.statuses):
            end.close()
        self.context.term()
        return log

    def close(self) -> None:
        """Stop the processes that a failed test has left running."""
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def start_core() -> Iterator[Callable[[EngineConfig, str], CoreProcess]]:
    with ExitStack() as stack:

        def start(config: EngineConfig, program: str) -> CoreProcess:
            core = CoreProcess(config, program)
            stack.callback(core.close)
            return core

        yield start


@pytest.fixture
def config(tmp_path: Path) -> Iterator[EngineConfig]:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    yield engine_config(run_dir, frontend=FrontendConfig(dump_dir=str(tmp_path / "dumps")))


def test_violated_invariants_are_logged_counted_and_dumped_once(
    config, tmp_path, capsys, start_core
):
    core = start_core(config, SABOTAGE)
    core.start()
    received = core.generate(20)
    log = core.stop()
    assert sum(len(outputs.token_ids) // 4 for outputs in received) == 20
    assert "a scheduler invariant is violated: free and held blocks: 62 counted, 63" in log
    assert sum(o.stats.num_invariant_violations for o in received if o.stats is not None) >= 3
    (path,) = (tmp_path / "dumps").glob(f"*-violation{SUFFIX}")
    assert read_dump(path).reason == "violation"
    # Replay with the original scheduler locates the first difference: one more block was in use.
    assert replay([str(path)]) == 1
    assert "output of step 1" in capsys.readouterr().out


def test_a_core_that_waits_for_its_workers_sends_heartbeats(config, start_core):
    core = start_core(config, HONEST)
    core.await_stage(Stage.STARTING)
    await_message(core.worker, CoreHello)
    heartbeats = HeartbeatReader(config, ["core 0"])
    read: list[float] = []

    def has_read_three() -> bool:
        read.extend(at for _, at in heartbeats.read())
        return len(read) >= 3

    assert eventually(has_read_three)
    heartbeats.close()
    core.answer_greeting()
    core.stop()


def test_held_requests_are_kept_until_a_greeting_is_complete(config, start_core):
    core = start_core(config, HONEST)
    await_message(core.worker, CoreHello)
    held = [
        HeldRequest((0, number), 1.0 + number, 40, (int32_bytes(range(first, first + 3)),))
        for number, first in ((5, 1), (6, 4), (7, 7))
    ]
    core.answer_greeting(held)
    again = [
        EngineCoreRequest(
            20 + number,
            int32_bytes([number] * 40),
            SamplingParams(max_tokens=4),
            1.0 + number,
            is_resubmitted=True,
            output_token_ids=int32_bytes([9]),
            was_index=number,
        )
        for number in (5, 6)
    ]
    core.client.send(ClientHello(PROTOCOL_VERSION, config.epoch, 0, again[:1], is_whole=False))
    entered = await_message(core.worker, SchedulerOutput).new_requests
    core.worker.send(ModelRunnerOutput(1, int32_bytes([7])))
    core.client.send(AddRequests(again[1:], ends_greeting=True))
    deadline = time.monotonic() + TIMEOUT_S
    while len(entered) < 2:
        assert time.monotonic() < deadline, "the second does not enter"
        step = await_message(core.worker, SchedulerOutput)
        entered += step.new_requests
        core.worker.send(ModelRunnerOutput(step.step, int32_bytes([7])))
    assert [data.request_id for data in entered] == [(0, 25), (0, 26)]
    assert [data.num_computed_tokens for data in entered] == [40, 40]
    core.stop()


def test_logprobs_over_the_message_limit_fail_only_their_request(config, start_core):
    core = start_core(config, SMALL_FRAMES)
    core.start()
    num_alternatives = {0: 1, 1: 3000}
    core.client.send(
        AddRequests(
            [
                EngineCoreRequest(
                    index, int32_bytes([index, 2]), SamplingParams(max_tokens=3, logprobs=k), 0.0
                )
                for index, k in num_alternatives.items()
            ]
        )
    )
    slots: list[int] = []
    indices: dict[int, int] = {}
    finished: dict[int, FinishedRequest] = {}
    answered: list[int] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(finished) < 2:
        assert time.monotonic() < deadline
        if core.worker.socket.poll(5) and isinstance(
            step := core.worker.receive(), SchedulerOutput
        ):
            indices |= {new.slot: new.request_id[1] for new in step.new_requests}
            slots = slots if step.slots is None else int32_view(step.slots).tolist()
            logprobs = [
                RowLogprobs(slot, 1, int32_bytes([7] * size), bytes(4 * size), int32_bytes([1]))
                for slot in slots
                for size in [1 + num_alternatives[indices[slot]]]
            ]
            sampled = int32_bytes([7] * len(slots))
            core.worker.send(ModelRunnerOutput(step.step, sampled, logprobs=logprobs))
        if isinstance(message := core.client.receive(), EngineCoreOutputs):
            finished |= {done.request_index: done for done in message.finished}
            answered += [entry.request_index for entry in message.logprobs]
    core.stop()
    assert answered == [0, 0, 0]
    assert finished[0].reason is FinishReason.LENGTH
    assert finished[1].reason is FinishReason.ERROR
    assert "log-probabilities of this request exceed the largest message" in finished[1].message


def test_a_step_without_an_answer_ends_the_core(config, start_core):
    limits = RecoveryConfig(step_timeout_s=1.0, heartbeat_timeout_s=1.0)
    core = start_core(msgspec.structs.replace(config, recovery=limits), HONEST)
    core.start()
    request = EngineCoreRequest(0, int32_bytes([1, 2, 3]), SamplingParams(max_tokens=1), 0.0)
    core.client.send(AddRequests([request]))
    await_message(core.client, ReplicaLost)
    status = core.await_stage(Stage.FAILED)
    assert re.fullmatch(r"no worker has returned step 1 for [123] s", status.detail)
    assert core.process.wait(20) == 1
    core.stop()


def test_intact_invariants_write_no_dump(config, tmp_path, start_core):
    core = start_core(config, HONEST)
    core.start()
    received = core.generate(20)
    assert "books" not in core.stop()
    assert sum(o.stats.num_invariant_violations for o in received if o.stats is not None) == 0
    assert not (tmp_path / "dumps").exists()


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_a_kv_events_endpoint_in_use_fails_the_start_with_the_remedy(config, field, start_core):
    with zmq.Context() as context, context.socket(zmq.PUB) as squatter:
        port = squatter.bind_to_random_port("tcp://127.0.0.1")
        events = KVEventsConfig(
            **{"endpoint": "tcp://127.0.0.1:0", field: f"tcp://127.0.0.1:{port}"}
        )
        cache = CacheConfig(block_size=16, kv_events=events)
        core = start_core(msgspec.structs.replace(config, cache=cache), HONEST)
        status = core.await_stage(Stage.FAILED)
        assert core.process.wait(20) == 1
        log = core.stop()
    assert "--kv-events-config" in status.detail
    assert (
        f"{field} tcp://127.0.0.1:{port} cannot be bound: Address already in use" in status.detail
    )
    assert "choose another" in status.detail
    assert "Traceback" not in log
