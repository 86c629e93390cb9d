"""One frontend's connection to one core and, after a restart, to its successors.

It handles greetings, sends requests in batches, and detects lost messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
import zmq

from ....protocol import transport
from ....protocol.arrays import int32_bytes, int32_view
from ....protocol.config import PROTOCOL_VERSION, EngineConfig, ReplicaRole
from ....protocol.errors import EngineError
from ....protocol.messages import (
    AbortRequests,
    AddRequests,
    AppendInputs,
    CallResult,
    ClientHello,
    ClientMessage,
    CoreMessage,
    CoreReady,
    EndReasoning,
    EngineCoreOutputs,
    EngineCoreRequest,
    LossNoted,
    PauseState,
    PauseUpdate,
    ReplicaCall,
    ReplicaLoadUpdate,
    ReplicaLost,
)
from ....protocol.supervisor_messages import ReplicaInfo, ReplicaState
from ....protocol.transport import FrameTooLarge, Peer, encode
from .async_peer import AsyncPeer
from .core_load import CoreLoad

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 512 * 1024
"""Maximum bytes of a message with requests, so that neither side blocks for long."""
PIECE_REQUESTS: Final = 256
"""Maximum requests of a message with requests, so that neither side blocks for long."""

_IN_ROTATION: Final = (ReplicaState.SERVING, ReplicaState.RESTARTING, ReplicaState.WAKING)

_ENVELOPE_BYTES: Final = 64
"""Maximum bytes of a message in addition to its requests."""

_TOO_LARGE: Final = "this request is too large for a message between the engine's processes; send a shorter prompt or fewer sequences"
_INVALID: Final = "the engine's core refused this request as invalid; see the server's log"


class CoreEvents(msgspec.Struct):
    """Callbacks of a connection.

    Attributes:
        on_ready: A core accepts requests and has none from this frontend. Requests that the callback adds are sent in
            the answer to the core's greeting.
        on_outputs: Outputs arrived. If the callback raises, the message is dropped.
        on_lost_outputs: Outputs were lost and the connection restarts; `on_ready` follows.
        on_replica_lost: The core is about to exit, and lists the requests that it was computing.
        on_unsent_request: A request cannot be sent, or its core has refused it, for the given reason.
        on_end_reasoning: Another frontend asks to end the reasoning of an answer; returns the result.
        on_refused: The core can never serve this frontend; the argument is the reason.
        pause: The last pause that a core has reported. Restarted cores get it from the frontends.
    """

    on_ready: Callable[[CoreReady], None]
    on_outputs: Callable[[EngineCoreOutputs], None]
    on_lost_outputs: Callable[[int], None]
    on_replica_lost: Callable[[ReplicaLost], None]
    on_unsent_request: Callable[[int, str], None]
    on_end_reasoning: Callable[[EndReasoning], CallResult]
    on_refused: Callable[[str], None]
    pause: PauseState = PauseState.RUNNING


class CoreConnection:
    """Sends requests to a core and receives its outputs, once the core has sent its greeting.

    Requests are sent at the end of each tick of the event loop, split into several messages if needed. The requests
    that `on_ready` adds form the answer to the greeting; the last message of the answer is marked.

    A greeting resets the connection: the core that sends it has none of the earlier requests. When outputs are
    missing or invalid, reconnecting makes the core send a new greeting.

    Attributes:
        lost_time: The time at which the core was last lost, in CLOCK_MONOTONIC seconds.
        is_serving: True if the core accepts new requests.
        is_in_rotation: True if requests may wait for this core while it does not serve.
        is_stuck: True if its replica makes no progress, so that new requests go to others.
        state: The state of the core's replica.
        has_ended: True if the core has exited and the next one has not started; in sleep, if all processes have exited.
        wakes_on_request: True if the replica sleeps until a request comes.
        role: The role of the core's replica: prefill, decode or both.
        weights: The ID and the version of its weights; empty for those of the start.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        client_index: int,
        core_index: int,
        events: CoreEvents,
    ) -> None:
        self.core_index = core_index
        self.load = CoreLoad(config.scheduler)
        self.ready = False
        self.lost_time = 0.0
        self.is_serving = True
        self.is_in_rotation = True
        self.is_stuck = False
        self.state = ReplicaState.SERVING
        self.has_ended = self.wakes_on_request = False
        self.role = config.parallel.role_of(core_index)
        self.weights = ("", "")
        self.epoch = 0
        self._latest_epoch = 0
        self._excused_epoch = 0
        self._num_dropped_messages = 0
        self._client_index = client_index
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._last_sequence: float | None = None
        self._is_greeting = False
        self._greeting: dict[int, EngineCoreRequest] = {}
        self._requests: dict[int, EngineCoreRequest] = {}
        self._appended: list[AppendInputs] = []
        self._aborted: list[int] = []
        self._moved: list[int] = []
        self._flush_scheduled = False
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._num_calls = 0
        self._context = context
        self._address = config.core_address(core_index)
        self._connect()

    def _connect(self) -> None:
        name = b"client%d" % self._client_index
        self._wire = Peer[CoreMessage](self._context, self._address, name, CoreMessage)
        self._peer = AsyncPeer[CoreMessage](self._wire, self._receive)

    def apply_status(self, replica: ReplicaInfo) -> None:
        """Apply the supervisor's status of this core."""
        self.state, self.has_ended = replica.state, replica.has_ended
        self.wakes_on_request = replica.wakes_on_request
        self.is_in_rotation = replica.wakes_on_request or replica.state in _IN_ROTATION
        self.is_serving = replica.is_up and replica.state is ReplicaState.SERVING
        self.role = replica.role or self.role
        latest_epoch = replica.epoch + replica.has_ended
        self._latest_epoch = max(self._latest_epoch, latest_epoch)
        if latest_epoch > self.epoch:
            self._lose()
        if replica.epoch == self.epoch and replica.state is not ReplicaState.SERVING:
            # An operator may have requested the restart, which is then not a crash.
            self._excused_epoch = self.epoch
        if not self.ready:
            self.fail_calls(self._unavailable_error())

    def _lose(self) -> None:
        if self.ready:
            self.ready, self.lost_time = False, time.monotonic()

    @property
    def is_paused(self) -> bool:
        """True if an operator has paused generation."""
        return self._events.pause is not PauseState.RUNNING

    @property
    def is_asleep(self) -> bool:
        """True if the core's replica sleeps, or wakes at present."""
        return self.state in (ReplicaState.SLEEPING, ReplicaState.WAKING)

    @property
    def is_for_prefill(self) -> bool:
        """True if the core computes prompts for other replicas, and generates only while none of them serves."""
        return self.role is ReplicaRole.PREFILL

    def exited_silently(self, epoch: int) -> bool:
        """Return whether the core of `epoch` crashed without naming the requests that it was computing."""
        return 0 < epoch < self._latest_epoch and epoch != self._excused_epoch

    def reconnect(self) -> None:
        """Reconnect because outputs are missing or invalid.

        The core then drops this frontend's requests and sends a new greeting.
        """
        self._lose()
        self._events.on_lost_outputs(self.core_index)
        # From here on, every message is dropped until the next greeting.
        self._last_sequence = math.inf
        self._num_dropped_messages += self._wire.num_dropped_frames
        self._peer.close()
        self._connect()

    def num_dropped_frames(self) -> int:
        """Return the number of frames that were invalid or duplicates."""
        return self._wire.num_dropped_frames + self._num_dropped_messages

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request for the end of this tick. This does nothing while the core is not ready."""
        if self.ready:
            self._requests[request.request_index] = request
            self._schedule_flush()

    def append_inputs(self, request: EngineCoreRequest, message: AppendInputs) -> None:
        """Queue encoder inputs, which `request` has already, unless it will be sent together with them."""
        index = request.request_index
        if self.ready and index not in self._greeting and index not in self._requests:
            self._appended.append(message)
            self._schedule_flush()

    def abort_request(self, request_index: int) -> None:
        """Drop a request that was not sent yet, or make the core abort it."""
        for unsent in (self._greeting, self._requests):
            if unsent.pop(request_index, None) is not None:
                return
        self._aborted.append(request_index)
        self._schedule_flush()

    def release_request(self, request_index: int) -> None:
        """Make the core stop a request that moves to another replica, but hold its blocks until they are fetched."""
        self._moved.append(request_index)
        self._schedule_flush()

    def send_if_ready(self, message: ClientMessage) -> None:
        """Send a message if the core is up. Otherwise drop it, because the next core does not need it."""
        if self.ready:
            self._peer.send(message)

    def call(self, make_call: Callable[[int], ReplicaCall]) -> asyncio.Future[CallResult]:
        """Send the call that `make_call` returns for a call id, and return a future with the result.

        The future raises EngineError if the core is not ready or exits first.
        """
        self._num_calls += 1
        result = self._calls[self._num_calls] = self._loop.create_future()
        if not self.ready:
            self.fail_calls(self._unavailable_error())
        self._peer.send(make_call(self._num_calls))
        return result

    def _unavailable_error(self) -> EngineError:
        return EngineError(
            f"replica {self.core_index} is not up; retry when GET /engine/status reports it as ready"
        )

    def fail_calls(self, error: Exception) -> None:
        """Fail all unfinished calls with this error."""
        for result in self._calls.values():
            if not result.done():
                result.set_exception(error)
        self._calls.clear()

    def close(self) -> None:
        """Close the connection without sending queued requests."""
        self._discard_unsent()
        self._peer.close()

    def _discard_unsent(self) -> None:
        self._is_greeting = False
        self._greeting.clear()
        self._requests.clear()
        self._appended.clear()
        self._aborted.clear()
        self._moved.clear()

    def resume(self) -> None:
        """Receive and send although a callback that should have done it has failed."""
        self._peer.resume()
        self._flush_scheduled = False
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            # In this order, a failure to schedule it is not remembered as a success.
            self._loop.call_soon(self._flush)
            self._flush_scheduled = True

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self._send_queued()
        except Exception:
            # Some messages may be lost, for example for lack of memory.
            logger.exception("core %d: messages could not be sent; reconnecting", self.core_index)
            self.reconnect()

    def _send_queued(self) -> None:
        if not self.ready:
            # All requests are sent again after the next greeting.
            self._discard_unsent()
        if self._is_greeting:
            piece = self._take_piece(self._greeting)
            self._is_greeting = bool(self._greeting)
            self._peer.send(AddRequests(piece, ends_greeting=not self._is_greeting))
        elif self._requests and (piece := self._take_piece(self._requests)):
            self._peer.send(AddRequests(piece))
        appended, self._appended = self._appended, []
        for message in appended:
            self._peer.send(message)
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            self._peer.send(AbortRequests(int32_bytes(aborted)))
        if self._moved:
            moved, self._moved = self._moved, []
            self._peer.send(AbortRequests(int32_bytes(moved), are_moved=True))
        if self._is_greeting or self._requests:
            self._schedule_flush()

    def _take_piece(self, unsent: dict[int, EngineCoreRequest]) -> list[EngineCoreRequest]:
        """Remove and return as many requests as fit in one message. A request that cannot be sent is reported."""
        limit = min(PIECE_BYTES, transport.MAX_FRAME_BYTES - _ENVELOPE_BYTES)
        piece: list[msgspec.Raw] = []
        size = 0
        while unsent:
            index = next(iter(unsent))
            if len(piece) == PIECE_REQUESTS:
                break
            try:
                encoded = _encode_request(unsent[index])
            except EngineError as error:
                del unsent[index]
                logger.error("failing a request that cannot be sent: %s", error)
                self._events.on_unsent_request(index, str(error))
                continue
            if piece and size + len(encoded) > limit:
                break
            del unsent[index]
            piece.append(msgspec.Raw(encoded))
            size += len(encoded)
        # Each request is encoded only once, because msgspec copies a `Raw` unchanged.
        return cast(list[EngineCoreRequest], piece)

    def _receive(self, message: CoreMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            self._receive_outputs(message)
        elif isinstance(message, CoreReady):
            self._receive_ready(message)
        elif isinstance(message, PauseUpdate):
            self._events.pause = message.state
        elif isinstance(message, ReplicaLoadUpdate):
            self._receive_load_update(message)
        elif isinstance(message, CallResult):
            result = self._calls.pop(message.call_id, None)
            if result is not None and not result.done():
                result.set_result(message)
        elif isinstance(message, AbortRequests):
            for index in int32_view(message.request_indices).tolist():
                logger.error("core %d refused a request as invalid", self.core_index)
                self._events.on_unsent_request(index, _INVALID)
        elif isinstance(message, EndReasoning):
            self._peer.send(self._events.on_end_reasoning(message))
        else:
            self._lose()
            if not message.is_own:
                self._excused_epoch = self.epoch
            self._events.on_replica_lost(message)
            self._peer.send(LossNoted())

    def _receive_outputs(self, outputs: EngineCoreOutputs) -> None:
        last = self._last_sequence
        if last is not None and outputs.sequence <= last:
            self._num_dropped_messages += 1
            return
        self._last_sequence = outputs.sequence
        try:
            if last is not None and outputs.sequence != last + 1:
                raise ValueError(
                    f"message {outputs.sequence} follows message {last}; those between were lost"
                )
            if outputs.core_index != self.core_index:
                raise ValueError(
                    f"core {self.core_index} sent a message as core {outputs.core_index}"
                )
            self._events.on_outputs(outputs)
        except Exception:
            logger.exception("core %d sent invalid outputs; reconnecting", self.core_index)
            self._num_dropped_messages += 1
            self.reconnect()

    def _receive_load_update(self, update: ReplicaLoadUpdate) -> None:
        try:
            self.load.prefixes.apply_update(update)
            self.load.num_others = update.num_others
        except ValueError:
            self._num_dropped_messages += 1

    def _receive_ready(self, ready: CoreReady) -> None:
        if (ready.version, ready.core_index) != (PROTOCOL_VERSION, self.core_index):
            self._events.on_refused(
                f"core {self.core_index} answered as core {ready.core_index} with protocol "
                f"version {ready.version}; this frontend expects version {PROTOCOL_VERSION}: "
                "restart the server"
            )
            return
        self._lose()
        self._discard_unsent()
        self._last_sequence = None
        self.load.num_others = 0
        self.load.prefixes.clear()
        self.fail_calls(
            EngineError(f"core {self.core_index} was restarted during this call; retry it")
        )
        self.ready, self.epoch, self.weights = True, ready.epoch, ready.weights
        self._latest_epoch = max(self._latest_epoch, ready.epoch)
        if ready.pause:
            self._events.pause = ready.pause
        self._events.on_ready(ready)
        self._greeting, self._requests = self._requests, {}
        piece = self._take_piece(self._greeting)
        self._is_greeting = bool(self._greeting)
        hello = ClientHello(
            PROTOCOL_VERSION,
            ready.epoch,
            self._client_index,
            piece,
            not self._is_greeting,
            self._events.pause,
        )
        self._peer.send(hello)


def _encode_request(request: EngineCoreRequest) -> bytes:
    """Return the encoded request.

    Raises:
        EngineError: The request does not fit in a message, or has a value that no message can have.
    """
    try:
        encoded = encode(request)
    except FrameTooLarge:
        raise EngineError(_TOO_LARGE) from None
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise EngineError(f"this request cannot be sent to the engine's core: {error}") from None
    if len(encoded) > transport.MAX_FRAME_BYTES - _ENVELOPE_BYTES:
        raise EngineError(_TOO_LARGE)
    return encoded
