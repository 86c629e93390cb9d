"""A socket returns only messages of the expected types, whatever it receives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine.protocol.config import EngineConfig, ModelConfig
from engine.protocol.messages import (
    AbortRequests,
    CallResult,
    ClientHello,
    ClientMessage,
    CoreMessage,
    CoreReady,
)
from engine.protocol.supervisor_messages import Stage
from engine.protocol.transport import (
    FrameTooLarge,
    Hub,
    Peer,
    StatusReceiver,
    StatusReporter,
    encode,
)
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from support.suite.examples import examples

TIMEOUT_MS = 30_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hub"


def receive(hub: Hub[Any]) -> tuple[bytes, Any]:
    while True:
        assert hub.socket.poll(TIMEOUT_MS)
        # An invalid frame wakes the poll, too, and is dropped.
        if (received := hub.receive()) is not None:
            return received


def connect(hub: Hub[Any], peer: Peer[Any], identity: bytes) -> None:
    """Wait until the hub has received the connection of the peer."""
    assert peer.receive() is None
    while not hub.socket.poll(10):
        assert peer.receive() is None
    assert hub.receive() == (identity, None)


def test_messages_of_one_connection_are_not_delivered_to_the_next(
    context: zmq.Context[Any], address: str
) -> None:
    peer: Peer[CoreMessage] = Peer(context, address, b"a", CoreMessage)
    for epoch in range(3):
        peer.send(ClientHello(1, 99, 0))
        with zmq.Context() as of_hub:
            hub: Hub[ClientMessage] = Hub(of_hub, address, ClientMessage)
            connect(hub, peer, b"a")
            hub.send(b"a", CoreReady(1, epoch, 0, 10, 16))
            assert peer.receive(block=True) == CoreReady(1, epoch, 0, 10, 16)
            peer.send(ClientHello(1, epoch, 0))
            assert receive(hub) == (b"a", ClientHello(1, epoch, 0))
            hub.close()
        while peer.socket.poll(10, zmq.POLLOUT):
            assert peer.receive() is None
    peer.close()


def test_peers_and_hub_exchange_messages(context: zmq.Context[Any], address: str) -> None:
    hub: Hub[ClientMessage] = Hub(context, address, ClientMessage)
    peers: list[Peer[CoreMessage]] = [
        Peer(context, address, name, CoreMessage) for name in (b"a", b"b")
    ]
    for peer, name in zip(peers, (b"a", b"b"), strict=True):
        connect(hub, peer, name)
    for peer in peers:
        peer.send(ClientHello(1, 1, 0))
    senders = {receive(hub)[0] for _ in peers}
    assert senders == {b"a", b"b"}
    ready = CoreReady(1, 1, 0, 10, 16)
    hub.send_frame([b"a", b"b"], encode(ready))
    assert [peer.receive(block=True) for peer in peers] == [ready, ready]
    assert peers[0].receive() is None
    for end in (hub, *peers):
        end.close()


def test_a_message_over_the_size_limit_is_not_sent_and_the_connection_stays(
    context: zmq.Context[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.protocol.transport.MAX_FRAME_BYTES", 1000)
    hub: Hub[ClientMessage] = Hub(context, address, ClientMessage)
    peer: Peer[CoreMessage] = Peer(context, address, b"a", CoreMessage)
    connect(hub, peer, b"a")
    for size in (2000, 996):
        with pytest.raises(FrameTooLarge, match=rf"of {size + 11} bytes .* 1000 bytes"):
            peer.send(AbortRequests(bytes(size)))
    peer.send(AbortRequests(bytes(989)))
    assert receive(hub) == (b"a", AbortRequests(bytes(989)))
    with pytest.raises(FrameTooLarge):
        hub.send(b"a", CallResult(1, True, "x" * 1000))
    hub.send(b"a", CallResult(1, True, "x"))
    assert peer.receive(block=True) == CallResult(1, True, "x")
    assert hub.receive() is None
    hub.close()
    peer.close()


@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_invalid_frames_are_counted_and_dropped(tmp_path: Path, frames: list[bytes]) -> None:
    assume(frames != [b""])
    with zmq.Context() as context:
        hub: Hub[ClientMessage] = Hub(context, f"ipc://{tmp_path}/garbage", ClientMessage)
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"ipc://{tmp_path}/garbage")
            stranger.send_multipart(frames)
            stranger.send(msgspec.msgpack.encode(AbortRequests(b"\0\0\0\0")))
            _, message = receive(hub)
        assert message == AbortRequests(b"\0\0\0\0")
        assert hub.num_dropped_frames == 1
        hub.close()


def test_message_of_another_direction_is_dropped(context: zmq.Context[Any], address: str) -> None:
    hub: Hub[ClientMessage] = Hub(context, address, ClientMessage)
    peer: Peer[CoreMessage] = Peer(context, address, b"x", CoreMessage)
    connect(hub, peer, b"x")
    peer.send(CoreReady(1, 1, 0, 10, 16))
    peer.send(ClientHello(1, 1, 7))
    assert receive(hub)[1] == ClientHello(1, 1, 7)
    assert hub.num_dropped_frames == 1
    hub.close()
    peer.close()


def test_status_reports_reach_the_supervisor(context: zmq.Context[Any], tmp_path: Path) -> None:
    config = EngineConfig(str(tmp_path), 1, ModelConfig("m", "p", "t", ("m",), "llama", 9, 9, (2,)))
    receiver = StatusReceiver(context, config)
    reporter = StatusReporter(context, config, "worker 0")
    with context.socket(zmq.PUSH) as stranger:
        stranger.connect(config.supervisor_address())
        stranger.send(b"\xc1garbage")
        assert receiver.receive(TIMEOUT_MS) is None
        assert receiver.num_dropped_frames == 1
        reporter.report(Stage.LOADING, "weights", 3, 10)
        reports = []
        while len(reports) < 1:
            report = receiver.receive(TIMEOUT_MS)
            reports += [report] if report else []
    assert (reports[0].process, reports[0].stage, reports[0].done) == ("worker 0", Stage.LOADING, 3)
    reporter.close()
    receiver.close()
