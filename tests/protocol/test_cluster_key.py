"""Authentication on the sockets that other machines connect to."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine.protocol.cluster_key import ClusterKey, load_cluster_key
from engine.protocol.errors import ConfigError
from engine.protocol.messages import AbortRequests, ClientHello, ClientMessage
from engine.protocol.transport import Hub, Peer
from msgspec.structs import replace

HELLO = ClientHello(1, 1, 0)
TIMEOUT_MS = 30_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def key() -> ClusterKey:
    return ClusterKey.generate()


@pytest.fixture
def hub(context: zmq.Context[Any], key: ClusterKey) -> Iterator[Hub[ClientMessage]]:
    hub: Hub[ClientMessage] = Hub(context, "tcp://127.0.0.1:*", ClientMessage, key)
    yield hub
    hub.close()


def address_of(hub: Hub[Any]) -> str:
    return hub.socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")


def connect(hub: Hub[Any], friend: Peer[Any]) -> None:
    """Wait until the hub has received the connection of the peer."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not hub.socket.poll(10):
        assert friend.receive() is None
        assert time.monotonic() < deadline
    assert hub.receive() == (b"f", None)


def strangers(key: ClusterKey) -> dict[str, ClusterKey | None]:
    other = ClusterKey.generate()
    return {
        "no key": None,
        "another key": other,
        "another server": replace(
            key, server_public=other.server_public, server_secret=other.server_secret
        ),
        "another client": replace(
            key, client_public=other.client_public, client_secret=other.client_secret
        ),
    }


@pytest.mark.parametrize("who", ["no key", "another key", "another server", "another client"])
def test_a_peer_without_the_key_neither_sends_nor_receives(
    hub: Hub[ClientMessage], key: ClusterKey, who: str
) -> None:
    with zmq.Context() as elsewhere:
        stranger: zmq.Socket[bytes] = elsewhere.socket(zmq.DEALER)
        stranger.set(zmq.LINGER, 0)
        stranger.set(zmq.IDENTITY, b"worker0")
        stranger.set(zmq.PROBE_ROUTER, 1)
        if (false_key := strangers(key)[who]) is not None:
            false_key.secure_client(stranger)
        stranger.connect(address_of(hub))
        stranger.send(msgspec.msgpack.encode(HELLO))
        friend: Peer[AbortRequests] = Peer(elsewhere, address_of(hub), b"f", AbortRequests, key)
        # The message of the authenticated peer shows that there was enough time for that of the other.
        connect(hub, friend)
        hub.send(b"f", AbortRequests(b""))
        assert friend.receive(block=True) == AbortRequests(b"")
        friend.send(HELLO)
        assert hub.socket.poll(TIMEOUT_MS)
        assert hub.receive() == (b"f", HELLO)
        hub.send(b"worker0", AbortRequests(b""))
        assert stranger.poll(300) == 0
        assert hub.receive() is None
        stranger.close()
        friend.close()


def test_bytes_that_are_not_zmq_are_ignored(hub: Hub[ClientMessage], key: ClusterKey) -> None:
    host, port = address_of(hub).removeprefix("tcp://").split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(9), os.urandom(4096)):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(TIMEOUT_MS / 1000)
            answer = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(garbage)
                while piece := connection.recv(4096):
                    answer += piece
        # At most libzmq's own greeting, which contains the socket type.
        assert len(answer) <= 64
    with zmq.Context() as elsewhere:
        friend: Peer[AbortRequests] = Peer(elsewhere, address_of(hub), b"f", AbortRequests, key)
        connect(hub, friend)
        friend.close()


def test_a_key_file_is_private_and_is_not_overwritten(tmp_path: Path, key: ClusterKey) -> None:
    path = tmp_path / "key"
    key.save(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_cluster_key(str(path)) == key
    with pytest.raises(ConfigError, match="exists"):
        ClusterKey.generate().save(str(path))
    assert load_cluster_key(str(path)) == key


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a key"),
        (b"\xff\xfe", "not a key"),
        (b'{"server_public": "x"}', "not a key"),
        (
            b'{"server_public":"x","server_secret":"x","client_public":"x","client_secret":"x"}',
            "not",
        ),
    ],
)
def test_an_invalid_key_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path}.*{message}"):
        load_cluster_key(str(path))


def test_a_key_file_that_others_can_read_is_rejected(tmp_path: Path, key: ClusterKey) -> None:
    path = tmp_path / "key"
    key.save(str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cluster_key(str(path))
    with pytest.raises(ConfigError, match="engine keygen"):
        load_cluster_key(str(tmp_path / "none"))
