"""The pause of a core, which computes nothing until an operator resumes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from typing import Any

import msgspec

from ..protocol.arrays import int32_view
from ..protocol.messages import (
    AbortByID,
    AbortRequests,
    AddRequests,
    AppendInputs,
    CallResult,
    ClientHello,
    ClientMessage,
    CoreReady,
    EngineCoreRequest,
    FinishReason,
    PauseGeneration,
    PauseMode,
    PauseState,
    PauseUpdate,
    ResumeGeneration,
)
from ..protocol.transport import Hub
from .reporting.client_calls import ABORTED
from .scheduler.interface import SchedulerInterface


class Pause:
    """The pause of a core. While it is FINISHING, new requests are held here instead of being scheduled.

    The scheduler does not know of pauses, so that its decisions can be repeated without them.
    """

    def __init__(
        self,
        ready: CoreReady,
        scheduler: SchedulerInterface,
        clients: Hub[ClientMessage],
        client_indices: Mapping[bytes, int],
        add_requests: Callable[[int, list[EngineCoreRequest]], None],
    ) -> None:
        self._scheduler = scheduler
        self._clients = clients
        self._client_indices = client_indices
        self._add_requests = add_requests
        self._ready = ready
        self._state = PauseState.RUNNING
        self._was_called = False
        self._clears_cache = False
        self._held: dict[tuple[int, int], EngineCoreRequest] = {}
        self._held_inputs: list[tuple[int, AppendInputs]] = []
        self._callers: list[tuple[bytes, int]] = []

    @property
    def stops_steps(self) -> bool:
        """True if no step may be scheduled."""
        return self._state is PauseState.PAUSED

    @property
    def ready(self) -> CoreReady:
        """The greeting of the core."""
        return msgspec.structs.replace(self._ready, pause=self._state)

    def apply_hello(self, identity: bytes, hello: ClientHello) -> None:
        """Pause if this core has just started and a frontend reports that its predecessor was paused."""
        if hello.pause and not self._was_called and not self._state:
            self._enter(hello.pause)
        elif hello.pause is not self._state:
            self._clients.send(identity, PauseUpdate(self._state))

    def take_message(self, identity: bytes, client_index: int, message: ClientMessage) -> bool:
        """Apply a message of a client as far as it concerns the pause. Return True if nothing else must be done."""
        if isinstance(message, PauseGeneration | ResumeGeneration):
            self._answer(identity, message)
            return True
        if isinstance(message, AbortByID):
            # The scheduler, which gets them now, aborts them.
            self._release(lambda request: message.request_id in ("", request.request_id))
        elif isinstance(message, AbortRequests):
            self.drop_requests(client_index, {*int32_view(message.request_indices).tolist()})
        elif isinstance(message, AddRequests | AppendInputs):
            return self._hold(client_index, message)
        return False

    def _answer(self, identity: bytes, call: PauseGeneration | ResumeGeneration) -> None:
        self._was_called = True
        if isinstance(call, ResumeGeneration):
            self._enter(PauseState.RUNNING)
            self._release()
            self._answer_callers(ok=False, detail="generation was resumed")
            self._clients.send(identity, CallResult(call.call_id, True))
            return
        self._callers.append((identity, call.call_id))
        if call.mode is PauseMode.KEEP:
            self._clears_cache = False
            self._enter(PauseState.PAUSED)
            self._release()
            return
        self._clears_cache = call.clear_cache
        if call.mode is PauseMode.ABORT:
            self._release()
            keys = self._scheduler.find_requests("")
            self._scheduler.finish_requests(keys, FinishReason.ABORT, ABORTED)
        self._enter(PauseState.FINISHING)

    def advance(self, num_in_flight: int) -> None:
        """Complete a pause if no step is in flight and no request is left to finish."""
        if num_in_flight or not (self._callers or self._state is PauseState.FINISHING):
            return
        is_reset = True
        if self._state is PauseState.FINISHING:
            if any(self._scheduler.get_request_counts()):
                return
            if self._clears_cache:
                is_reset = self._scheduler.reset_prefix_cache(False, time.monotonic())
            self._enter(PauseState.PAUSED)
            self._release()
        detail = (
            "" if is_reset else "generation is paused, but blocks of the prefix cache are in use"
        )
        self._answer_callers(ok=is_reset, detail=detail)

    def _hold(self, client_index: int, message: AddRequests | AppendInputs) -> bool:
        if self._state is not PauseState.FINISHING:
            return False
        if isinstance(message, AppendInputs):
            is_held = (client_index, message.request_index) in self._held
            if is_held:
                self._held_inputs.append((client_index, message))
            return is_held
        if message.ends_greeting:
            return False
        for request in message.requests:
            self._held[client_index, request.request_index] = request
        return True

    def drop_requests(self, client_index: int, indices: Container[int] | None = None) -> None:
        """Drop held requests that a client has aborted, or all that it sent."""
        for client, index in list(self._held):
            if client == client_index and (indices is None or index in indices):
                del self._held[client, index]
        self._held_inputs = [
            (client, message)
            for client, message in self._held_inputs
            if (client, message.request_index) in self._held
        ]

    def _enter(self, state: PauseState) -> None:
        if state is not self._state:
            self._state = state
            for identity in self._client_indices:
                self._clients.send(identity, PauseUpdate(state))

    def _release(self, is_wanted: Callable[[EngineCoreRequest], Any] = bool) -> None:
        released = [key for key, request in self._held.items() if is_wanted(request)]
        for client_index, index in released:
            self._add_requests(client_index, [self._held.pop((client_index, index))])
        inputs, self._held_inputs = self._held_inputs, []
        for client_index, message in inputs:
            if (client_index, message.request_index) in self._held:
                self._held_inputs.append((client_index, message))
            else:
                self._scheduler.append_inputs(client_index, message)

    def _answer_callers(self, *, ok: bool, detail: str) -> None:
        callers, self._callers = self._callers, []
        for identity, call_id in callers:
            if identity in self._client_indices:
                self._clients.send(identity, CallResult(call_id, ok, detail))
