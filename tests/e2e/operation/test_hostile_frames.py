"""A real engine core with hostile peers: it counts and drops invalid frames, and serves the others.

An invalid step output cannot be dropped, because no valid one will follow, so it ends the core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import (
    PROTOCOL_VERSION,
    CacheConfig,
    Device,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.protocol.messages import (
    AbortRequests,
    AddRequests,
    ClientHello,
    CoreMessage,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    ReplicaLost,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.supervisor_messages import Heartbeat
from engine.protocol.transport import Peer
from engine.protocol.worker_messages import (
    AllocateKVCache,
    CoreHello,
    DraftTokenIds,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCommand,
    WorkerHello,
    WorkerMemory,
    WorkerReady,
)
from engine.workers.execution.null_runner import NullRunner, made_up_tokens, ordinary_token_ids
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.processes.program import wait_until
from support.servers.server import Server, default_model
from support.suite.examples import examples

VOCAB_SIZE = 1000
EPOCH = 3
TIMEOUT_S = 20.0
GOOD_LENGTH = 4
encode = msgspec.msgpack.encode


class Core:
    """The core process; the test is its worker, a frontend (client 0) and its hostile peers."""

    def __init__(self, run_dir: str) -> None:
        path = default_model()
        self.config = EngineConfig(
            run_dir=run_dir,
            epoch=EPOCH,
            model=ModelConfig("m", path, path, ("m",), "llama", VOCAB_SIZE, 256, (0,)),
            cache=CacheConfig(
                kv_events=KVEventsConfig(f"ipc://{run_dir}/events", f"ipc://{run_dir}/replay")
            ),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            parallel=ParallelConfig(api_server_count=2),
            device=DeviceConfig(device=Device.NULL, null_step_ms=0.0),
        )
        command = [sys.executable, "-m", "engine.core", str(self.config.save()), "0", str(EPOCH)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.context: zmq.Context[Any] = zmq.Context()
        self.worker: Peer[WorkerCommand] = Peer(
            self.context, self.config.worker_address(0), b"worker0", WorkerCommand
        )
        self._runner = NullRunner(self.config)
        self._start_worker()
        self.good = self._greet(0)
        self.hostile = self._greet(1)
        self.strangers = [
            self._stranger(address, identity)
            for address, identity in (
                (self.config.core_address(0), b"client9"),
                (self.config.worker_address(0), b"worker9"),
            )
        ]
        self.replay = self._stranger(f"ipc://{run_dir}/replay", b"subscriber")
        self.num_dropped = 0
        self.num_lies = 0
        self._num_requests = 0
        self._last_output = b""

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _stranger(self, address: str, identity: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, identity)
        socket.connect(address)
        return socket

    def await_from(self, peer: Peer[Any], kind: type) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            peer.socket.poll(100)
            while (message := peer.receive()) is not None:
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def _start_worker(self) -> None:
        self.await_from(self.worker, CoreHello)
        self.worker.send(WorkerHello(PROTOCOL_VERSION, EPOCH, 0))
        self.worker.send(WorkerMemory(0, 500))
        self.await_from(self.worker, AllocateKVCache)
        self.worker.send(WorkerReady(0))

    def _greet(self, client_index: int) -> Peer[CoreMessage]:
        name = b"client%d" % client_index
        peer: Peer[CoreMessage] = Peer(self.context, self.config.core_address(0), name, CoreMessage)
        self.await_from(peer, CoreReady)
        peer.send(ClientHello(PROTOCOL_VERSION, EPOCH, client_index))
        return peer

    def send_invalid(self, socket: zmq.Socket[bytes], *frames: bytes) -> None:
        socket.send_multipart(frames)
        self.num_lies += 1

    def generate(self, lies_of_worker: list[Any]) -> list[int]:
        """Run a request of the honest client; the worker sends these frames before each answer."""
        return self.tokens_of(self.submit(), lies_of_worker)

    def tokens_of(self, index: int, lies_of_worker: list[Any]) -> list[int]:
        """Return the tokens of a request, which is the only one."""
        tokens: list[int] = []
        is_over = False
        deadline = time.monotonic() + TIMEOUT_S
        while not is_over:
            assert time.monotonic() < deadline and self.process.poll() is None
            if (step := self.worker.receive()) is not None:
                assert isinstance(step, SchedulerOutput)
                answer = self._runner.execute(step, lambda _: None).output()
                for make_invalid in lies_of_worker:
                    self.send_invalid(self.worker.socket, make_invalid(answer, self._last_output))
                self._last_output = encode(answer)
                self.worker.send(answer)
            elif (outputs := self.good.receive()) is not None:
                if not isinstance(outputs, EngineCoreOutputs):
                    continue
                self._note(outputs)
                tokens += int32_view(outputs.token_ids).tolist()
                assert not any(done.message for done in outputs.finished)
                is_over = index in int32_view(outputs.finished_set).tolist()
            else:
                time.sleep(0.0005)
        return tokens

    def submit(self, *others: EngineCoreRequest) -> int:
        """Send the honest client's next request, after others. Return its index."""
        self._num_requests += 1
        index = self._num_requests
        params = SamplingParams(max_tokens=GOOD_LENGTH, seed=index, ignore_eos=True)
        request = EngineCoreRequest(index, int32_bytes([index % 9, 1]), params, time.monotonic())
        self.good.send(AddRequests([*others, request]))
        return index

    def suspects_after(self, nonsense: dict[str, Any]) -> list[int]:
        """Send this answer to the first step. Return the requests that the core suspects; the core has exited."""
        self.submit()
        step = self.await_from(self.worker, SchedulerOutput)
        answer = self._runner.execute(step, lambda _: None).output()
        self.worker.send(msgspec.structs.replace(answer, **nonsense))
        lost = self.await_from(self.good, ReplicaLost)
        assert self.process.wait(TIMEOUT_S) == 1
        return int32_view(lost.suspects).tolist()

    def expected(self) -> list[int]:
        seeds = np.full(GOOD_LENGTH, self._num_requests, np.int64)
        positions = np.arange(2, 2 + GOOD_LENGTH, dtype=np.int32)
        return made_up_tokens(seeds, positions, ordinary_token_ids(VOCAB_SIZE, (0,))).tolist()

    def _note(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            self.num_dropped += outputs.stats.num_dropped_frames


@contextmanager
def open_core() -> Iterator[Core]:
    with tempfile.TemporaryDirectory(prefix="hostile-") as run_dir:
        core = Core(run_dir)
        try:
            yield core
        finally:
            core.close()


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    with open_core() as core:
        yield core


def request(**fields: Any) -> EngineCoreRequest:
    params = fields.pop("params", SamplingParams(max_tokens=2))
    fields = {"request_index": 5, "prompt_token_ids": int32_bytes([1]), **fields}
    return EngineCoreRequest(sampling_params=params, arrival_time=0.0, **fields)


UNSOUND_REQUESTS = [
    request(request_index=2**40),
    request(request_index=-1),
    request(priority=2**40),
    request(deadline=float("nan")),
    request(prompt_token_ids=b"123"),
    request(prompt_token_ids=int32_bytes([VOCAB_SIZE])),
    request(prompt_token_ids=int32_bytes([-1])),
    request(output_token_ids=b"12345"),
    request(eos_token_ids=(2**50,)),
    request(params=SamplingParams(max_tokens=2, seed=2**63)),
    request(params=SamplingParams(max_tokens=-4)),
    request(params=SamplingParams(max_tokens=2, temperature=float("nan"))),
    request(params=SamplingParams(max_tokens=2, logit_bias={-7: 1.0})),
]
LIES_OF_CLIENTS = [
    *(encode(AddRequests([each])) for each in UNSOUND_REQUESTS),
    encode(AbortRequests(b"123")),
    encode(ClientHello(PROTOCOL_VERSION + 1, EPOCH, 1)),
    encode(ClientHello(PROTOCOL_VERSION, EPOCH - 1, 1)),
    encode(ClientHello(PROTOCOL_VERSION, EPOCH, 0)),
    encode(ClientHello(PROTOCOL_VERSION, EPOCH, 2**31)),
    b"\xdd\xff\xff\xff\xff",
    b"\x92\xa3add\xdd\xff\xff\xff\xff",
    b"\x92\xa5abort\xc6\xff\xff\xff\xff",
]


def garbage(*honest: Any) -> st.SearchStrategy[bytes]:
    """Return random bytes, and truncated valid messages."""
    frames = [encode(message) for message in honest]
    truncated = st.sampled_from(frames).flatmap(
        lambda frame: st.integers(1, len(frame) - 1).map(lambda end: frame[:end])
    )
    return st.binary(min_size=1, max_size=60) | truncated


LIES_OF_WORKERS = [
    lambda answer, last: last or b"\xc1",
    lambda answer, last: encode(WorkerHello(PROTOCOL_VERSION, EPOCH, 0)),
    lambda answer, last: encode(DraftTokenIds(1, slots=int32_bytes([99]))),
    lambda answer, last: encode(WorkerMemory(-1, 2**60)),
    lambda answer, last: encode(msgspec.structs.replace(answer, step=answer.step - 1)),
    lambda answer, last: b"\x93\xa6output\x01\xc6\xff\xff\xff\xff",
]


@examples(60, suppress_health_check=list(HealthCheck))
@given(
    of_strangers=st.lists(garbage(WorkerReady(0), AbortRequests(b"1234")), max_size=6),
    of_client=st.lists(
        st.sampled_from(LIES_OF_CLIENTS) | garbage(AddRequests([request()])), max_size=6
    ),
    of_worker=st.lists(
        st.sampled_from(LIES_OF_WORKERS)
        | garbage(ModelRunnerOutput(1, int32_bytes([1]))).map(lambda frame: lambda *_: frame),
        max_size=3,
    ),
    of_subscriber=st.lists(st.binary(max_size=7), max_size=3),
)
def test_invalid_frames_are_counted_and_dropped_and_others_are_served(
    core: Core,
    of_strangers: list[bytes],
    of_client: list[bytes],
    of_worker: list[Any],
    of_subscriber: list[bytes],
) -> None:
    for frame in of_strangers:
        for stranger in core.strangers:
            core.send_invalid(stranger, frame)
    for frame in of_client:
        core.send_invalid(core.hostile.socket, frame)
    for frame in of_subscriber:
        core.send_invalid(core.replay, b"", frame)
    assert core.generate(of_worker) == core.expected()
    deadline = time.monotonic() + TIMEOUT_S
    while core.num_dropped < core.num_lies:
        assert time.monotonic() < deadline, (core.num_dropped, core.num_lies)
        assert core.generate([]) == core.expected()
    assert core.num_dropped == core.num_lies


def test_only_the_invalid_requests_of_a_message_are_refused(core: Core) -> None:
    index = core.submit(*UNSOUND_REQUESTS)
    refused = core.await_from(core.good, AbortRequests)
    assert {*int32_view(refused.request_indices).tolist()} == {5}
    assert core.tokens_of(index, []) == core.expected()


def test_frames_dropped_by_the_supervisor_are_in_the_metrics() -> None:
    with (
        tempfile.TemporaryDirectory() as base,
        Server(default_model(), "--device", "null", env={"XDG_RUNTIME_DIR": base}) as server,
        zmq.Context() as context,
    ):
        assert server.metric("engine:dropped_frames_total") == 0
        (path,) = Path(base).glob("*/supervisor")
        with context.socket(zmq.PUSH) as hostile:
            hostile.connect(f"ipc://{path}")
            hostile.send(b"\xc1garbage")
            hostile.send(encode(Heartbeat("core 0", pid=1)))
            wait_until(
                lambda: server.metric("engine:dropped_frames_total") == 2, what="they are counted"
            )
        assert server.metric("engine:dropped_frames_total", engine="") == 2
        assert server.stop() == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        {"step": 10**9},
        {"sampled_token_ids": int32_bytes([VOCAB_SIZE])},
        {"sampled_token_ids": int32_bytes([1, 1])},
    ],
)
def test_an_invalid_output_ends_the_core_and_suspects_are_named(
    nonsense: dict[str, Any],
) -> None:
    with open_core() as core:
        assert core.suspects_after(nonsense) == [1]
