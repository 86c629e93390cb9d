"""Typed messages over ZeroMQ sockets.

A `Hub` (ROUTER) serves many `Peer`s (DEALER). Both send and receive only msgspec structs. A frame that does not decode
to the expected type is counted and dropped.

A peer connects as soon as its hub exists, and again after the hub was restarted. Each connection begins with a probe
from the peer, which the hub reports as a new connection. No frame sent on one connection is received on another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import zmq

from .cluster_key import ClusterKey, admit_clients
from .config import EngineConfig
from .errors import ConfigError, EngineError
from .shared_record import RecordReader, RecordWriter
from .supervisor_messages import (
    CauseFound,
    EngineStatus,
    ProcessStatus,
    ReplicaCommand,
    Stage,
    StatusChanged,
    SupervisorMessage,
    UpdateWeights,
)

logger = logging.getLogger(__name__)

In = TypeVar("In")

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a frame in bytes. A larger one closes its connection.

Processes must not send one, because it would be sent again on the next connection and close that as well.
"""

RECONNECT_MS: Final = 10
"""Milliseconds between a peer's attempts to connect."""

REMOTE_RECONNECT_MS: Final = 1000
"""Maximum milliseconds between attempts to connect to another machine; the interval grows up to this value."""

KEEPALIVE_S: Final = 20
"""Seconds of silence after which the system sends a TCP keepalive, so that firewalls keep the connection open.

ZeroMQ's heartbeats are not used. They would close the connection of a peer that is merely stopped, and a reconnection
makes the replica fail.
"""

_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SNDMORE: Final = int(zmq.SNDMORE)
"""pyzmq's constants as plain integers, because the operators of its enumerations run Python code."""

_send: Final = zmq.backend.Socket.send
"""The send function of pyzmq's backend. `zmq.Socket.send` adds Python code that these messages do not need."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that decoding a malformed frame can raise."""

_encode: Final = msgspec.msgpack.Encoder().encode


class FrameTooLarge(EngineError):
    """Raised for a message larger than `MAX_FRAME_BYTES`. `size` is in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a message of {size} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
        self.size = size


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message. Raise FrameTooLarge if the frame is larger than `MAX_FRAME_BYTES`."""
    frame = _encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(frame))
    return frame


def _open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    return socket


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a receive would not block. Trying and catching `zmq.Again` would take several times as long."""
    events: Any = socket.get(_EVENTS)
    return bool(events & _POLLIN)


class Peer(Generic[In]):
    """The connecting end of a connection to a `Hub`, which addresses it by `identity`.

    A message that is sent while there is no connection is lost.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        identity: bytes,
        types: Any,
        key: ClusterKey | None = None,
    ) -> None:
        self.socket = _open_socket(context, zmq.DEALER)
        self.socket.set(zmq.IDENTITY, identity)
        self.socket.set(zmq.PROBE_ROUTER, 1)
        # Queue frames only on an established connection. Otherwise frames for an exited hub would reach the next one.
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if key is not None:
            self.socket.set(zmq.RECONNECT_IVL_MAX, REMOTE_RECONNECT_MS)
            self.socket.set(zmq.IPV6, int("[" in address))
            key.secure_client(self.socket)
        self.socket.connect(address)
        self.num_dropped_frames = 0
        self._decode: Callable[[memoryview], In] = msgspec.msgpack.Decoder(types).decode

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            FrameTooLarge: The message is too large; nothing is sent.
        """
        with contextlib.suppress(zmq.Again):
            _send(self.socket, encode(message), _NOBLOCK)

    def receive(self, *, block: bool = False) -> In | None:
        """Return the next message, or None if there is none. With `block`, wait for one."""
        while block or _has_message(self.socket):
            # Do not copy: copying a frame of megabytes would block the caller as long as decoding it.
            frame = self.socket.recv(copy=False)
            try:
                return self._decode(frame.buffer)
            except UNREADABLE:
                self.num_dropped_frames += 1
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Hub(Generic[In]):
    """The listening end of many connections. Each peer chooses the identity by which the hub addresses it.

    A hub with a `key` admits only peers with the same key. A context can have one such hub.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        types: Any,
        key: ClusterKey | None = None,
    ) -> None:
        self.socket = _open_socket(context, zmq.ROUTER)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            admit_clients(context, key)
            self.socket.set(zmq.IPV6, int("[" in address))
            key.secure_server(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self.num_dropped_frames = 0
        self._decode: Callable[[memoryview], In] = msgspec.msgpack.Decoder(types).decode

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """Send a message to a peer.

        Raises:
            FrameTooLarge: The message is too large; nothing is sent.
        """
        self.send_frame((identity,), encode(message))

    def send_frame(self, identities: Iterable[bytes], frame: bytes) -> None:
        """Send an encoded message to each of several peers."""
        socket = self.socket
        for identity in identities:
            _send(socket, identity, _SNDMORE)
            _send(socket, frame)

    def receive(self) -> tuple[bytes, In | None] | None:
        """Return the next (identity of the sender, message), or None if there is none.

        If the message is None, the peer has reconnected. Messages from its earlier connection are obsolete, and
        messages sent to it before may be lost.
        """
        while _has_message(self.socket):
            if (received := self.receive_one()) is not None:
                return received
        return None

    def receive_one(self) -> tuple[bytes, In | None] | None:
        """Return the one message that a poll has reported, as `receive` does, or None if it cannot be decoded."""
        try:
            identity = self.socket.recv(_NOBLOCK)
        except zmq.Again:
            return None
        frame = self.socket.recv(copy=False)
        if not frame.more:
            if not len(data := frame.buffer):
                return identity, None
            try:
                return identity, self._decode(data)
            except UNREADABLE:
                pass
        while frame.more:
            frame = self.socket.recv(copy=False)
        self.num_dropped_frames += 1
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class StatusReporter:
    """Reports the stages of this process to the supervisor.

    `run` terminates `context` and closes its sockets, so that the process does not exit before the supervisor has the
    last report.

    `is_ready` is true once any reporter of this process has reported the stage READY.
    """

    is_ready: ClassVar[bool] = False

    def __init__(self, context: zmq.Context[Any], config: EngineConfig, process: str) -> None:
        self._process = process
        self.context = context
        self._socket = _open_socket(context, zmq.PUSH)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(config.supervisor_address())

    def send_command(self, command: ReplicaCommand | UpdateWeights) -> None:
        """Ask the supervisor for something that only it can do."""
        self._socket.send(encode(command))

    def report_cause_found(self) -> None:
        """Report that a request was found to have caused crashes, and will not run again."""
        self._socket.send(encode(CauseFound()))

    def report(self, stage: Stage, detail: str = "", done: int = 0, total: int = 0) -> None:
        """Report the stage that this process has reached."""
        StatusReporter.is_ready = stage is Stage.READY
        self._socket.send(
            encode(ProcessStatus(self._process, stage, detail, done, total, os.getpid()))
        )

    def run(self, work: Callable[[], None]) -> int:
        """Run a process's work and return its exit code.

        An error that ends the work is reported to the supervisor. Errors other than EngineError are also logged with a
        traceback.
        """
        try:
            work()
        except EngineError as error:
            self.report(Stage.FAILED, str(error))
            return error.exit_code
        except Exception as error:
            logger.exception("unexpected error")
            self.report(Stage.FAILED, f"{type(error).__name__}: {error}")
            return 1
        finally:
            self.close()
            self.context.destroy()
        return 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class StatusReceiver:
    """The supervisor's end of the connections from every `StatusReporter`."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self.socket = _open_socket(context, zmq.PULL)
        self.socket.bind(config.supervisor_address())
        self.num_dropped_frames = 0
        self._decode: Callable[[bytes], SupervisorMessage]
        self._decode = msgspec.msgpack.Decoder(SupervisorMessage).decode

    def receive(self, timeout_ms: int) -> SupervisorMessage | None:
        """Return the next message within `timeout_ms`, or None. Invalid frames are counted and dropped."""
        while _has_message(self.socket) or (timeout_ms and self.socket.poll(timeout_ms)):
            try:
                return self._decode(self.socket.recv())
            except UNREADABLE:
                self.num_dropped_frames += 1
                timeout_ms = 0
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class StatusPublisher:
    """Publishes the state of the whole engine to every `StatusSubscriber`, in a record.

    Raises:
        RunDirectoryError: The record cannot be created.
    """

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self._socket = _open_socket(context, zmq.PUB)
        self._socket.bind(config.status_address())
        self._record = RecordWriter(config.status_path())

    def publish(self, status: EngineStatus) -> None:
        """Publish a state that subscribers must apply now."""
        self.refresh(status)
        self._socket.send(encode(StatusChanged()))

    def refresh(self, status: EngineStatus) -> None:
        """Publish a state that subscribers read when they need it."""
        self._record.write(status)

    def close(self) -> None:
        """Close the socket and the record."""
        self._socket.close()
        self._record.close()


class StatusSubscriber:
    """A frontend's access to the state that the `StatusPublisher` publishes.

    Attributes:
        socket: Becomes readable when there is a state to apply.
    """

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self.socket = _open_socket(context, zmq.SUB)
        self.socket.set(zmq.CONFLATE, 1)
        self.socket.subscribe(b"")
        self.socket.connect(config.status_address())
        self.num_dropped_frames = 0
        self._record = RecordReader(config.status_path(), EngineStatus)
        self._decode = msgspec.msgpack.Decoder(StatusChanged).decode

    def receive(self) -> EngineStatus | None:
        """Return the newest state, or None if it was read before."""
        try:
            while _has_message(self.socket):
                self._decode(self.socket.recv(_NOBLOCK))
        except UNREADABLE:
            self.num_dropped_frames += 1
        return self._record.read()

    @property
    def age_s(self) -> float:
        """The time since the newest state was published, in seconds."""
        return time.monotonic() - self._record.written_at

    def close(self) -> None:
        """Close the socket and the record."""
        self.socket.close()
        self._record.close()
