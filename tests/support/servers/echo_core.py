"""A core without a model: it speaks the real protocol and repeats each prompt over and over.

`step` and `receive` drive it from the thread of a test; `EchoCoreThread` lets it run by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
from engine.protocol.arrays import float32_bytes, float32_view, int32_bytes, int32_view
from engine.protocol.config import PROTOCOL_VERSION, EngineConfig
from engine.protocol.messages import (
    AbortByID,
    AbortRequests,
    AddRequests,
    CallResult,
    ClientHello,
    ClientMessage,
    CoreReady,
    DumpEventLog,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvents,
    ResetPrefixCache,
    SchedulerStats,
    TokenLogprobs,
)
from engine.protocol.sampling_params import PromptCandidates
from engine.protocol.transport import Hub

NUM_BLOCKS = 64


@dataclass
class EchoedRequest:
    request: EngineCoreRequest
    prompt: list[int] = field(init=False)
    num_generated: int = field(init=False)
    is_aborted: bool = False

    def __post_init__(self) -> None:
        self.num_generated = len(self.request.output_token_ids) // 4
        self.prompt = int32_view(self.request.prompt_token_ids).tolist()

    def next_token(self) -> int:
        token = self.prompt[self.num_generated % len(self.prompt)]
        self.num_generated += 1
        return token

    def end(self, token: int) -> FinishedRequest | None:
        index, params = self.request.request_index, self.request.sampling_params
        if self.num_generated > params.min_tokens:
            if token in self.request.eos_token_ids and not params.ignore_eos:
                return FinishedRequest(index, FinishReason.STOP)
            if token in params.stop_token_ids:
                return FinishedRequest(index, FinishReason.STOP, stop_reason=token)
        if self.num_generated == params.max_tokens:
            return FinishedRequest(index, FinishReason.LENGTH)
        return None


class EchoCore:
    """`running` holds the live requests of each client by request index; `received` every message.

    The first `num_refusals` requests find no room.
    """

    def __init__(self, config: EngineConfig, core_index: int = 0, epoch: int | None = None) -> None:
        self.config = config
        self.core_index = core_index
        self.is_greeting = True
        self.num_refusals = 0
        self.callers: list[bytes] = []
        self.dump_answer = (True, "/dumps/core0")
        self.ready = CoreReady(
            PROTOCOL_VERSION,
            config.epoch if epoch is None else epoch,
            core_index,
            NUM_BLOCKS,
            config.cache.block_size,
        )
        self.running: dict[bytes, dict[int, EchoedRequest]] = {}
        self.received: list[ClientMessage] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self.hub: Hub[ClientMessage] = Hub(
            self._context, config.core_address(core_index), ClientMessage
        )
        self._sequences: dict[bytes, int] = {}
        self._new: list[tuple[bytes, EchoedRequest]] = []
        self._finished_set: dict[bytes, list[int]] = {}

    @property
    def requests(self) -> list[EngineCoreRequest]:
        """Return every live request."""
        return [echo.request for of_client in self.running.values() for echo in of_client.values()]

    def greet(self) -> None:
        """Answer the greetings of clients."""
        while self.callers:
            self.hub.send(self.callers.pop(), self.ready)

    def receive(self) -> None:
        """Receive all messages that have arrived, and greet new clients."""
        self.read()
        if self.is_greeting:
            self.greet()

    def read(self) -> None:
        while (received := self.hub.receive()) is not None:
            client, message = received
            if message is None:
                self.callers.append(client)
                self.running.pop(client, None)
                continue
            if isinstance(message, ClientHello):
                self.running[client] = {}
            elif client not in self.running:
                # It comes from a connection that has been replaced.
                continue
            self.received.append(message)
            if isinstance(message, ClientHello | AddRequests):
                for request in message.requests:
                    echo = EchoedRequest(request)
                    self.running[client][request.request_index] = echo
                    self._new.append((client, echo))
            elif isinstance(message, AbortRequests):
                for index in int32_view(message.request_indices).tolist():
                    if self.running[client].pop(index, None) is not None:
                        self._finished_set.setdefault(client, []).append(index)
            elif isinstance(message, ResetPrefixCache):
                ok = message.reset_running_requests or not self.requests
                self.hub.send(client, CallResult(message.call_id, ok))
            elif isinstance(message, AbortByID):
                echoes = [e for of_client in self.running.values() for e in of_client.values()]
                found = [e for e in echoes if message.request_id in ("", e.request.request_id)]
                for echo in found:
                    echo.is_aborted = True
                self.hub.send(client, CallResult(message.call_id, True, str(len(found))))
            elif isinstance(message, DumpEventLog):
                self.hub.send(client, CallResult(message.call_id, *self.dump_answer))

    def report_queued(self) -> None:
        """Report that the new requests wait."""
        for client in self.running:
            new = [echo.request.request_index for owner, echo in self._new if owner == client]
            outputs = EngineCoreOutputs(self.core_index, 0, time.monotonic())
            outputs.events = [RequestEvents(EventKind.QUEUED, outputs.timestamp, int32_bytes(new))]
            self.send(client, outputs)

    def step(self) -> None:
        """Generate a token for every request, and send the outputs."""
        for client, running in self.running.items():
            self._report_progress(client)
            outputs = EngineCoreOutputs(self.core_index, 0, time.monotonic())
            new = int32_bytes(
                [echo.request.request_index for owner, echo in self._new if owner == client]
            )
            outputs.events = [
                RequestEvents(EventKind.QUEUED, outputs.timestamp, new),
                RequestEvents(EventKind.SCHEDULED, outputs.timestamp, new, bytes(len(new))),
                RequestEvents(EventKind.FIRST_TOKEN, outputs.timestamp, new),
            ]
            token_ids: list[int] = []
            counts = []
            predictions = []
            for index, echo in running.items():
                start = echo.num_generated
                new, finished = self._generate(echo)
                predicted = int32_view(echo.request.predicted_token_ids).tolist()[start:]
                pairs = list(zip(predicted, new, strict=False))
                num_right = sum(token == other for token, other in pairs)
                if pairs:
                    predictions.append((index, num_right, len(pairs) - num_right))
                token_ids += new
                counts.append(len(new))
                self._report_logprobs(outputs, echo, new)
                if finished is not None:
                    outputs.finished.append(finished)
                    self._finished_set.setdefault(client, []).append(index)
            outputs.request_indices = int32_bytes(list(running))
            outputs.token_ids = int32_bytes(token_ids)
            outputs.num_tokens = b"" if set(counts) <= {1} else int32_bytes(counts)
            outputs.prediction_counts = int32_bytes(predictions)
            for done in outputs.finished:
                del running[done.request_index]
            outputs.stats = SchedulerStats(
                num_running=len(running),
                kv_cache_usage=len(running) / NUM_BLOCKS,
                num_steps=1,
                num_scheduled_tokens=len(token_ids),
                step_tokens=int32_bytes([len(token_ids)]),
            )
            self.send(client, outputs)
        self._new.clear()

    def _report_progress(self, client: bytes) -> None:
        """Report one computed token of each new prompt whose request asks for it."""
        new = [
            echo.request.request_index
            for owner, echo in self._new
            if owner == client and echo.request.sampling_params.reports_progress
        ]
        if new:
            outputs = EngineCoreOutputs(self.core_index, 0, time.monotonic())
            indices, ones = int32_bytes(new), int32_bytes([1] * len(new))
            outputs.events = [
                RequestEvents(EventKind.SCHEDULED, outputs.timestamp, indices, bytes(len(indices))),
                RequestEvents(EventKind.PROGRESS, outputs.timestamp, indices, ones),
            ]
            self.send(client, outputs)

    def send(self, client: bytes, outputs: EngineCoreOutputs) -> None:
        """Send under the client's next sequence number."""
        outputs.sequence = self._sequences.get(client, 0)
        self._sequences[client] = outputs.sequence + 1
        outputs.finished_set = int32_bytes(self._finished_set.pop(client, []))
        self.hub.send(client, outputs)

    def lose_outputs(self) -> None:
        """Skip a sequence number for every client, as if a message were lost."""
        for client in self.running:
            self._sequences[client] = self._sequences.get(client, 0) + 1

    def close(self) -> None:
        self.hub.close()
        self._context.term()

    def _generate(self, echo: EchoedRequest) -> tuple[list[int], FinishedRequest | None]:
        new: list[int] = []
        finished = None
        if self.num_refusals:
            self.num_refusals -= 1
            finished = FinishedRequest(
                echo.request.request_index, FinishReason.REJECTED, message="the queue is full"
            )
        if echo.is_aborted:
            finished = FinishedRequest(
                echo.request.request_index, FinishReason.ABORT, message="aborted by the test"
            )
        if finished is None:
            new.append(echo.next_token())
            finished = echo.end(new[-1])
        return new, finished

    def _report_logprobs(
        self, outputs: EngineCoreOutputs, echo: EchoedRequest, new: list[int]
    ) -> None:
        params = echo.request.sampling_params
        index = echo.request.request_index
        if params.prompt_logprobs is not None and echo.num_generated == len(new):
            given = params.prompt_candidates
            message = _logprobs(
                index,
                echo.prompt[1:],
                params.prompt_logprobs,
                (*params.prompt_logprob_token_ids, *range(given.num_tokens if given else 0)),
            )
            outputs.prompt_logprobs.append(_with_candidates(message, given))
        if params.logprobs is not None:
            outputs.logprobs.append(
                _logprobs(index, new, params.logprobs, params.logprob_token_ids)
            )


def _with_candidates(message: TokenLogprobs, given: PromptCandidates | None) -> TokenLogprobs:
    """Return logprobs with -t / 1000 for the candidate t at each position."""
    if given is None:
        return message
    ids_TK = int32_view(message.token_ids).reshape(message.num_positions, -1).copy()
    values_TK = float32_view(message.logprobs).reshape(message.num_positions, -1).copy()
    rows = int32_view(given.token_ids).reshape(-1, given.num_tokens)
    ids_TK[given.first :, -given.num_tokens :] = rows
    values_TK[given.first :, -given.num_tokens :] = -rows / 1000
    return msgspec.structs.replace(
        message, token_ids=int32_bytes(ids_TK), logprobs=float32_bytes(values_TK)
    )


def _logprobs(index: int, tokens: Iterable[int], k: int, listed: tuple[int, ...]) -> TokenLogprobs:
    """Token t has logprob -t / 1000 and rank t; the most likely ones are 0 ... k-1 at -0.5 each."""
    chosen = np.array(list(tokens))
    alternatives = np.array([*range(k), *listed], np.int64)
    ids = np.column_stack([chosen, np.tile(alternatives, (len(chosen), 1))])
    values = -ids / 1000
    values[:, 1 : 1 + k] = -0.5
    return TokenLogprobs(
        index, len(chosen), int32_bytes(ids), float32_bytes(values), int32_bytes(chosen)
    )


class EchoCoreThread:
    """An `EchoCore` that steps whenever it has requests, at most every `step_s` seconds."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        self.core = EchoCore(config)
        self.step_s = step_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> EchoCoreThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.core.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            busy = bool(self.core.requests)
            self.core.hub.socket.poll(0 if busy else 20)
            self.core.receive()
            if self.core.requests:
                self.core.step()
                self._stop.wait(self.step_s)
