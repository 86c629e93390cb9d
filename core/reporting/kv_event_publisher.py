"""Publish KV-cache events over ZeroMQ (`--kv-events-config`)."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

import msgspec
import zmq

from ...protocol.config import KVEventsConfig
from ...protocol.errors import ConfigError
from ...protocol.kv_events import END_OF_REPLAY, KVCacheEvent, KVEventBatch

MAX_REQUEST_BYTES: Final = 1024
"""Maximum size of a replay request in bytes. A longer frame closes its connection."""


class KVEventPublisher:
    """Publishes batches of events, and replays missed batches to subscribers that request them.

    A subscriber sends the first sequence number that it lacks (8 bytes, big-endian) to the replay endpoint. It gets
    (sequence number, batch) for each stored batch from there on, followed by `END_OF_REPLAY`. The core's index is added
    to each port.

    Raises:
        ConfigError: An endpoint cannot be bound.
    """

    def __init__(self, context: zmq.Context[Any], config: KVEventsConfig, core_index: int) -> None:
        self._core_index = core_index
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self.num_dropped_frames = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, config.hwm)
        _bind(self._socket, "endpoint", endpoint_of_core(config.endpoint, core_index))
        self.replay_socket: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            self.replay_socket = context.socket(zmq.ROUTER)
            self.replay_socket.set(zmq.LINGER, 0)
            self.replay_socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            # Messages beyond the limit are lost. Up to half of the limit may be messages that were read already.
            self.replay_socket.set(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
            endpoint = endpoint_of_core(config.replay_endpoint, core_index)
            _bind(self.replay_socket, "replay_endpoint", endpoint)

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Send the events of one step without blocking. A subscriber that is too slow must request a replay."""
        batch = self._encode(KVEventBatch(time.time(), events, self._core_index))
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._kept.append((sequence, batch))
        self._socket.send_multipart((self._topic, sequence, batch))

    def serve_replays(self) -> None:
        """Answer all replay requests that have arrived."""
        while self.replay_socket is not None and self.replay_socket.poll(0):
            frames = self.replay_socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self.num_dropped_frames += 1
                continue
            identity, _, first = frames
            for sequence, batch in self._kept:
                if sequence >= first:
                    self.replay_socket.send_multipart((identity, b"", sequence, batch))
            self.replay_socket.send_multipart((identity, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close()
        if self.replay_socket is not None:
            self.replay_socket.close()


def _bind(socket: zmq.Socket[bytes], field: str, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-config: {field} {endpoint} cannot be bound: {error.strerror}; stop the program that "
            "uses it, or choose another address (each core adds its index to the port)"
        ) from error


def endpoint_of_core(endpoint: str, core_index: int) -> str:
    """Return the endpoint of one core: its index is added to the port, or appended as a suffix if there is no port."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{address}:{int(port) + core_index}"
    return f"{endpoint}.{core_index}" if core_index else endpoint
