"""The last events of a scheduler, always kept, at next to no cost.

They are kept in segments, each of which can be replayed by itself: it begins with a new scheduler or with a snapshot
of one. Only the last two segments are kept, so memory is bounded and there is always one whole segment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from itertools import chain
from typing import Final

import numpy as np

from ...protocol.arrays import Int32Array, Int64Array, int32_bytes, int32_view
from ...protocol.block_hash import HashBlocks, PlacedInput
from ...protocol.messages import EngineCoreOutputs, SchedulerOutput
from ..scheduler.features.grammars import GrammarBackend
from ..scheduler.scheduler import Scheduler
from ..state.external_dependency import ExternalDependency
from ..state.request import RequestKey
from .decision_hash import DecisionHash
from .events import (
    AddRequest,
    Answer,
    Decided,
    Event,
    GrammarAccepts,
    GrammarForces,
    GrammarRefused,
    Hashed,
    Schedule,
    TakeOutputs,
    Update,
)
from .frozen_state import FrozenState

SEGMENT_BYTES: Final = 8 << 20
"""Memory of a segment's events, roughly, before the next one begins."""

MAX_FROZEN_REQUESTS: Final = 10_000
"""With more live requests, freezing the state would hold up the steps for too long: it waits for fewer."""

DECISION_BYTES: Final = 300
"""Memory of a decision in the log, without arrays."""

REQUEST_BYTES: Final = 1000
"""Memory of an arrival in the log, without tokens and hashes."""

ANSWER_BYTES: Final = 100
"""Memory of an answer in the log, without hashes."""

UNFLUSHED_BYTES: Final = 32 << 10
"""Decisions and outputs are hashed together once they fill so much: the core sleeps between steps, and each time the
code for it would have to be fetched into the processor's caches. It is not more, so that no step is held up."""

FEW_STOPS: Final = 16
"""Up to so many stop tokens, each is searched for separately."""

FORGOTTEN_A_STEP: Final = 250
"""How many events of a dropped segment are freed at each step; freeing all at once would hold up a step."""

PATIENCE: Final = 4
"""While the state cannot be frozen a segment grows to so many times `SEGMENT_BYTES`; the next has no state then."""


class Segment:
    """Events in order. `start` is the state before them; None that of a new scheduler if `is_whole`, else unknown."""

    def __init__(self, start: FrozenState | None, is_whole: bool, chain_start: bytes) -> None:
        self.start = start
        self.is_whole = is_whole
        self.chain_start = chain_start
        self.events: list[Event] = []


class EventLog:
    """`num_bytes` estimates the memory of the last segment's events; every append must add to it."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.segment_bytes = segment_bytes
        self.chain = DecisionHash()
        self.segments: deque[Segment] = deque([Segment(None, True, b"")], maxlen=2)
        self.events = self.segments[-1].events
        self.num_bytes = 0
        self._ends: set[Collection[int]] = set()
        """Tokens at which some request of this segment stops."""
        self._recent: list[Update] = []
        self._decided: list[tuple[Decided, dict[int, EngineCoreOutputs]]] = []
        """What the chain has still to take in."""
        self._num_recent_bytes = 0
        self._outdated: list[Event] = []
        self.problem = ""
        """Why later states could not be captured: an error of ours."""

    def add(self, event: AddRequest) -> None:
        message = event.message
        self.events.append(event)
        self.num_bytes += REQUEST_BYTES + event.num_prompt_bytes + len(message.block_hashes)
        self.num_bytes += len(message.predicted_token_ids)
        self._ends.add(message.eos_token_ids)
        self._ends.add(message.sampling_params.stop_token_ids)

    def answer(self, event: Answer) -> None:
        """What a grammar, a connector or the hash function answered while the event before was handled."""
        self.events.append(event)
        self.num_bytes += ANSWER_BYTES

    def update(self, event: Update) -> None:
        self.events.append(event)
        self._recent.append(event)
        self._num_recent_bytes += len(event.result.sampled_token_ids)
        if self._outdated:
            del self._outdated[-FORGOTTEN_A_STEP:]

    def scheduled(self, event: Schedule, step: SchedulerOutput | None) -> None:
        """What came of the event. A step does not change once it is decided."""
        event.step = step
        self._decide(event, {})

    def told(self, event: Update | TakeOutputs, outputs: dict[int, EngineCoreOutputs]) -> None:
        """What the clients are told. The part that the chain covers does not change any more."""
        self._decide(event, outputs)
        for message in outputs.values():
            if message.logprobs or message.prompt_logprobs:
                # They may be large, and are not kept.
                self.settle()
                return

    def answered(self, answer: bool) -> None:
        """What came of the event before."""
        self.settle()
        self.chain.answered(answer)

    def _decide(self, event: Decided, outputs: dict[int, EngineCoreOutputs]) -> None:
        self._decided.append((event, outputs))
        self.num_bytes += DECISION_BYTES
        self._num_recent_bytes += DECISION_BYTES
        if self._num_recent_bytes > UNFLUSHED_BYTES:
            self.settle()

    def settle(self) -> None:
        """Take in recent decisions, and forget the tokens of outputs but for those that some request stops at."""
        self._num_recent_bytes = 0
        chain = self.chain
        decided, self._decided = self._decided, []
        for event, outputs in decided:
            if isinstance(event, Schedule):
                chain.scheduled(event.step)
            else:
                event.told = chain.told(outputs)
            event.chain = chain.value
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        recent, self._recent = self._recent, []
        frames = [event.result.sampled_token_ids for event in recent]
        frames = [frame[: len(frame) // 4 * 4] for frame in frames]
        token_ids = int32_view(b"".join(frames))
        ends = np.cumsum([len(frame) // 4 for frame in frames])
        hits = self._find_stops(token_ids)
        for event, frame in zip(recent, frames, strict=True):
            event.num_tokens = len(frame) // 4
            event.result = copy(event.result)
            event.result.sampled_token_ids = b""
        if not len(hits):
            return
        owners = np.searchsorted(ends, hits, "right")
        for index in np.unique(owners).tolist():
            event = recent[index]
            positions = hits[owners == index]
            starts = ends[index] - event.num_tokens
            event.stops = int32_bytes(np.stack((positions - starts, token_ids[positions]), 1))

    def _find_stops(self, token_ids: Int32Array) -> Int64Array:
        """The positions of tokens at which some request of this segment stops."""
        stops = set(chain.from_iterable(self._ends))
        if len(stops) > FEW_STOPS:
            return np.isin(token_ids, list(stops)).nonzero()[0]
        is_stop = np.zeros(len(token_ids), np.bool_)
        for token_id in stops:
            is_stop |= token_ids == token_id
        return is_stop.nonzero()[0]

    def roll_over(self, scheduler: Scheduler) -> None:
        """Begin the next segment with the scheduler's state, if that costs little."""
        requests = scheduler.requests
        start = None
        if len(requests) <= MAX_FROZEN_REQUESTS and not self.problem:
            try:
                scheduler.slots.flush()
                start = FrozenState(scheduler)
            except Exception as error:
                # Whatever is wrong here, requests must not suffer from it.
                self.problem = f"{type(error).__name__}: {error}"
        if start is None and self.num_bytes <= PATIENCE * self.segment_bytes:
            return
        self.settle()
        self._ends = {request.stop_token_ids for request in requests.values()}
        if len(self.segments) == self.segments.maxlen:
            self._outdated = self.segments[0].events
        chain_start = self.chain.value
        self.chain = DecisionHash(chain_start)
        self.segments.append(Segment(start, start is not None, chain_start))
        self.events = self.segments[-1].events
        # Without a state to start from, the next chance to have one must come soon.
        self.num_bytes = 0 if start is not None else self.segment_bytes

    def recording(self, hash_blocks: HashBlocks) -> HashBlocks:
        """`hash_blocks`, its digests written down: a replay has no tokens to hash."""

        def hash_recorded(
            token_ids: Int32Array, block_size: int, parent: bytes, inputs: Sequence[PlacedInput]
        ) -> bytes:
            digests = hash_blocks(token_ids, block_size, parent, inputs)
            self.answer(Hashed(digests))
            self.num_bytes += len(digests)
            return digests

        return hash_recorded


class RecordedGrammars(ExternalDependency):
    """A grammar backend of which the answers are recorded: a replay has no grammars to ask."""

    def __init__(self, backend: GrammarBackend, log: EventLog) -> None:
        self._log = log
        self._backend = backend
        self.compile = backend.compile
        self.fill_bitmask = backend.fill_bitmask
        self.find_error = backend.find_error
        self.rollback = backend.rollback
        self.release = backend.release

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        accepted = self._backend.accept_tokens(key, token_ids)
        if not accepted:
            self._log.answer(GrammarRefused(key))
        return accepted

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        num_tokens = self._backend.num_acceptable(key, token_ids)
        if num_tokens < len(token_ids):
            self._log.answer(GrammarAccepts(key, num_tokens))
        return num_tokens

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        forced = self._backend.forced_tokens(key, token_ids)
        if forced:
            self._log.answer(GrammarForces(key, len(forced)))
        return forced
