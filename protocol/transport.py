"""Typed messages over ZMQ sockets.

A `Hub` (ROUTER) serves many `Peer`s (DEALER). Both send and receive msgspec structs only: a frame
that does not decode to the expected type is counted and dropped.

A peer dials until its hub is there, and again when the hub was restarted. Each connection begins with a probe
from the peer, which the hub is told of; nothing crosses from one connection into the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

from .cluster_key import ClusterKey, admit_clients
from .config import EngineConfig
from .errors import ConfigError, EngineError
from .supervisor_messages import (
    CauseFound,
    EngineStatus,
    Heartbeat,
    ProcessStatus,
    ReplicaCommand,
    Stage,
    SupervisorMessage,
)

logger = logging.getLogger(__name__)

In = TypeVar("In")

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""A larger frame closes its connection. No process sends one: it would be sent again and close the next one."""

RECONNECT_MS: Final = 10
"""How often a peer dials."""

REMOTE_RECONNECT_MS: Final = 1000
"""A peer dials another machine less and less often, but at least this often."""

KEEPALIVE_S: Final = 20
"""How long a connection between machines is silent before the system sends something, so that no firewall forgets it.
ZMQ's own heartbeats would also close that of a peer that merely stands still, and a new one ends the replica."""

_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SNDMORE: Final = int(zmq.SNDMORE)
"""An int: pyzmq's own constants are enumerations, of which every operator runs Python code."""

_send: Final = zmq.backend.Socket.send
"""What `zmq.Socket` adds is for other messages, in Python."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a hostile frame may raise."""

_encode: Final = msgspec.msgpack.Encoder().encode


class FrameTooLarge(EngineError):
    """A message that its receiver would not take."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"a message of {size} bytes is larger than one may be ({MAX_FRAME_BYTES} bytes)"
        )
        self.size = size


def encode(message: msgspec.Struct) -> bytes:
    """Raises FrameTooLarge."""
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
    """Whether a receive would not wait. To be told so by an exception costs several times as much."""
    events: Any = socket.get(_EVENTS)
    return bool(events & _POLLIN)


class Peer(Generic[In]):
    """One end of a conversation with a `Hub`. `identity` names it there.

    It speaks when spoken to: what is sent while there is no connection is lost.
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
        # A queue belongs to a connection. Without this, frames for a dead hub would reach the next one.
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if key is not None:
            self.socket.set(zmq.RECONNECT_IVL_MAX, REMOTE_RECONNECT_MS)
            self.socket.set(zmq.IPV6, int("[" in address))
            key.present(self.socket)
        self.socket.connect(address)
        self.num_dropped_frames = 0
        self._decode: Callable[[bytes], In] = msgspec.msgpack.Decoder(types).decode

    def send(self, message: msgspec.Struct) -> None:
        """Raises FrameTooLarge, and nothing is sent."""
        with contextlib.suppress(zmq.Again):
            _send(self.socket, encode(message), _NOBLOCK)

    def receive(self, *, block: bool = False) -> In | None:
        """The next message; None when there is none (never None if `block`)."""
        while block or _has_message(self.socket):
            try:
                return self._decode(self.socket.recv())
            except UNREADABLE:
                self.num_dropped_frames += 1
        return None

    def close(self) -> None:
        self.socket.close()


class Hub(Generic[In]):
    """The bound end of many conversations; peers are known by their identity.

    With a `key` only peers that have it are heard. A context can have one hub with a key.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        types: Any,
        key: ClusterKey | None = None,
    ) -> None:
        """Raises ConfigError if the address cannot be bound."""
        self.socket = _open_socket(context, zmq.ROUTER)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            admit_clients(context, key)
            self.socket.set(zmq.IPV6, int("[" in address))
            key.guard(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self.num_dropped_frames = 0
        self._decode: Callable[[bytes], In] = msgspec.msgpack.Decoder(types).decode

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """Raises FrameTooLarge, and nothing is sent."""
        self.send_frame((identity,), encode(message))

    def send_frame(self, identities: Iterable[bytes], frame: bytes) -> None:
        """Send an encoded message to each."""
        socket = self.socket
        for identity in identities:
            _send(socket, identity, _SNDMORE)
            _send(socket, frame)

    def receive(self) -> tuple[bytes, In | None] | None:
        """(identity of the sender, message): the next one; None when there is none.

        The message None is a new connection: what this peer said before counts no more, what was sent to
        it may be lost.
        """
        while _has_message(self.socket):
            if (received := self.receive_one()) is not None:
                return received
        return None

    def receive_one(self) -> tuple[bytes, In | None] | None:
        """What `receive` returns, of the one message that a poll has found; None if it does not decode."""
        try:
            identity = self.socket.recv(_NOBLOCK)
        except zmq.Again:
            return None
        frame = self.socket.recv(copy=False)
        if not frame.more:
            if not (data := frame.bytes):
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
        self.socket.close()


class StatusReporter:
    """Tells the supervisor how far this process has come."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig, process: str) -> None:
        self._process = process
        self._socket = _open_socket(context, zmq.PUSH)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(config.supervisor_address())

    def beat(self, heartbeat: Heartbeat) -> None:
        """Give a sign of life. Process and pid are filled in."""
        heartbeat = msgspec.structs.replace(heartbeat, process=self._process, pid=os.getpid())
        self._socket.send(encode(heartbeat))

    def command(self, command: ReplicaCommand) -> None:
        """Ask for something that only the supervisor can do."""
        self._socket.send(encode(command))

    def cause_found(self) -> None:
        """A request that has cost lives will cost no more."""
        self._socket.send(encode(CauseFound()))

    def report(self, stage: Stage, detail: str = "", done: int = 0, total: int = 0) -> None:
        self._socket.send(
            encode(ProcessStatus(self._process, stage, detail, done, total, os.getpid()))
        )

    def run(self, work: Callable[[], None]) -> int:
        """Do a process's work and return its exit code.

        An error that ends the work is reported. One that is no EngineError is also logged, with its traceback.
        """
        try:
            work()
        except EngineError as error:
            self.report(Stage.FAILED, str(error))
            return 1
        except Exception as error:
            logger.exception("unexpected error")
            self.report(Stage.FAILED, f"{type(error).__name__}: {error}")
            return 1
        finally:
            self.close()
        return 0

    def close(self) -> None:
        self._socket.close()


class StatusReceiver:
    """The supervisor's end of every `StatusReporter`."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self.socket = _open_socket(context, zmq.PULL)
        self.socket.bind(config.supervisor_address())
        self.num_dropped_frames = 0
        self._decode: Callable[[bytes], SupervisorMessage]
        self._decode = msgspec.msgpack.Decoder(SupervisorMessage).decode

    def receive(self, timeout_ms: int) -> SupervisorMessage | None:
        """The next message within `timeout_ms`; None when there is none. Garbage is counted and dropped."""
        while self.socket.poll(timeout_ms):
            try:
                return self._decode(self.socket.recv())
            except UNREADABLE:
                self.num_dropped_frames += 1
                timeout_ms = 0
        return None

    def close(self) -> None:
        self.socket.close()


class StatusPublisher:
    """Publishes the state of the whole engine; the supervisor's end of every `StatusSubscriber`."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self._socket = _open_socket(context, zmq.PUB)
        self._socket.bind(config.status_address())

    def publish(self, status: EngineStatus) -> None:
        self._socket.send(encode(status))

    def close(self) -> None:
        self._socket.close()


class StatusSubscriber:
    """A frontend's end of the `StatusPublisher`: only the newest state counts."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self.socket = _open_socket(context, zmq.SUB)
        self.socket.set(zmq.CONFLATE, 1)
        self.socket.subscribe(b"")
        self.socket.connect(config.status_address())
        self.num_dropped_frames = 0
        self._decode = msgspec.msgpack.Decoder(EngineStatus).decode

    def receive(self) -> EngineStatus | None:
        """The newest state, if it was not read yet."""
        try:
            return self._decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except UNREADABLE:
            self.num_dropped_frames += 1
            return None

    def close(self) -> None:
        self.socket.close()
