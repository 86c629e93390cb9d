"""The most recent events of a scheduler. They are always recorded, because recording costs little.

Events are kept in segments. Each segment begins with a new scheduler or with a snapshot of one, so it can be replayed
on its own. Only the last two segments are kept, so memory is bounded and one segment is always complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from ...protocol.arrays import Int32Array, Int64Array, contains, int32_pairs, int32_view
from ...protocol.block_hash import HashBlocks, PlacedInput
from ...protocol.messages import EngineCoreOutputs
from ...protocol.worker_messages import SchedulerOutput
from ..scheduler.scheduler import Scheduler
from .content import EMPTY, drop_content, result_without_content, step_without_content
from .decision_hash import DecisionHash
from .events import (
    HASH_BLOCKS,
    AddRequest,
    Answer,
    Call,
    Decided,
    Event,
    Schedule,
    TakeOutputs,
    Update,
)
from .frozen_state import FrozenState

SEGMENT_BYTES: Final = 8 << 20
"""Approximate size of a segment's events in bytes, above which the next segment begins."""

MAX_FROZEN_REQUESTS: Final = 10_000
"""Number of live requests above which the state is not captured, because that would delay steps too long."""

DECISION_BYTES: Final = 450
"""Estimated bytes of a decision in the log, not counting arrays."""

REQUEST_BYTES: Final = 1000
"""Estimated bytes of an arrival in the log, not counting tokens, hashes, names and inputs."""

LISTED_BYTES: Final = 40
"""Estimated bytes of a stop token in the log."""

EVENT_BYTES: Final = 100
"""Estimated bytes of any other event or encoder input in the log, not counting hashes."""

UNFLUSHED_BYTES: Final = 48 << 10
"""Number of bytes in which decisions and outputs are hashed together.

The core sleeps between steps, so hashing each one separately would reload the code into the CPU caches each time.
Larger batches would delay a step. They are hashed at the end of a turn, unless there are too many before.
"""

FEW_STOPS: Final = 16
"""Number of distinct stop tokens up to which each is searched for separately."""

FREED_PER_STEP: Final = 250
"""Number of objects of a dropped segment that are freed per step, because freeing all at once would delay a step."""

FREED_HASHES_PER_STEP: Final = 4096
"""Number of block hashes in the initial state of a dropped segment that are freed per step."""

MAX_UNFLUSHED: Final = 8
"""Number of decisions above which a new segment begins one turn after the last flush, not in the same turn."""

LATE_FACTOR: Final = 2
"""Factor by which a segment may exceed `segment_bytes` before the next one begins even if a step waits for it."""

MAX_SEGMENT_GROWTH: Final = 4
"""Factor by which a segment may exceed `segment_bytes` while the state cannot be captured.

The next segment then has no initial state.
"""


class Segment:
    """A part of the log: consecutive events.

    `start` is the state before them. If it is None, they begin with a new scheduler if `is_whole`, else with an unknown
    state. `initial_hash` is the decision hash before them.
    """

    def __init__(self, start: FrozenState | None, is_whole: bool, initial_hash: bytes) -> None:
        self.start = start
        self.is_whole = is_whole
        self.initial_hash = initial_hash
        self.events: list[Event] = []


class EventLog:
    """The recent events of one scheduler.

    `num_bytes` estimates the memory of the last segment's events. Code that appends an event must add its size.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.segment_bytes = segment_bytes
        self.decision_hash = DecisionHash()
        self.segments: deque[Segment] = deque([Segment(None, True, b"")], maxlen=2)
        self.events = self.segments[-1].events
        self.num_bytes = 0
        self._ends: set[Collection[int]] = set()
        """Stop tokens of the requests in this segment."""
        self._whole: list[AddRequest | Schedule] = []
        """The latest events from which content that no replay reads was not dropped yet."""
        self._recent: list[Update] = []
        self._decided: list[tuple[Decided, dict[int, EngineCoreOutputs]]] = []
        """Decisions that are not in the decision hash yet."""
        self._num_recent_bytes = 0
        self._outdated: list[dict[Any, Any] | list[Any]] = []
        """Containers of the objects of a dropped segment."""
        self.problem = ""
        """The error that prevented later states from being captured; empty if there was none."""

    def add_request(self, event: AddRequest) -> None:
        """Record an arrival. Its message must not change afterwards."""
        self.events.append(event)
        self._whole.append(event)

    def add_event(self, event: Call | Answer, num_bytes: int = 0) -> None:
        """Record a call or an answer to the last event, with an array of `num_bytes` or other large parts."""
        self.events.append(event)
        self.num_bytes += EVENT_BYTES + num_bytes

    def add_update(self, event: Update) -> None:
        """Record the output of a step. Also frees a few objects of a dropped segment."""
        self.events.append(event)
        self._recent.append(event)
        self._num_recent_bytes += len(event.result.sampled_token_ids)
        if self._outdated:
            self._free_some()

    def _free_some(self) -> None:
        held = self._outdated[-1]
        if isinstance(held, dict):
            for _ in range(min(FREED_PER_STEP, len(held))):
                held.popitem()
        else:
            is_hash = bool(held) and type(held[-1]) in (bytes, type(None))
            del held[-(FREED_HASHES_PER_STEP if is_hash else FREED_PER_STEP) :]
        if not held:
            self._outdated.pop()

    def record_step(self, event: Schedule, step: SchedulerOutput | None) -> None:
        """Record the result of `schedule`. The step must not change afterwards."""
        event.step = step
        if step is not None and (step.new_requests or step.encoders or step.kv_connector_metadata):
            self._whole.append(event)
        self._decide(event, {})

    def record_outputs(
        self, event: Update | TakeOutputs, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Record outputs for clients. The parts covered by the decision hash must not change afterwards."""
        self._decide(event, outputs)
        for message in outputs.values():
            if message.logprobs or message.prompt_logprobs or message.pooled:
                # Hash log-probabilities and vectors immediately instead of at the next flush, because they may be
                # large.
                self.flush()
                return

    def record_result(self, result: bool) -> None:
        """Record the result of the last event."""
        self.flush()
        self.decision_hash.add_result(result)

    def _decide(self, event: Decided, outputs: dict[int, EngineCoreOutputs]) -> None:
        self._decided.append((event, outputs))
        self.num_bytes += DECISION_BYTES
        self._num_recent_bytes += DECISION_BYTES
        if self._num_recent_bytes > LATE_FACTOR * UNFLUSHED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hash the recent decisions, and drop their sampled tokens except those at which some request stops."""
        self._drop_content()
        self._num_recent_bytes = 0
        decision_hash = self.decision_hash
        decided, self._decided = self._decided, []
        for event, outputs in decided:
            if isinstance(event, Schedule):
                decision_hash.add_step(event.step)
            else:
                event.reports = decision_hash.add_outputs(outputs) or EMPTY
            event.decision_hash = decision_hash.value
        self._drop_tokens()

    def _drop_content(self) -> None:
        """Drop what no replay reads of the latest arrivals and steps, and count the bytes of the arrivals."""
        whole, self._whole = self._whole, []
        for event in whole:
            if isinstance(event, Schedule):
                event.step = event.step and step_without_content(event.step)
                continue
            message = event.message
            drop_content(message)
            self._ends.add(message.eos_token_ids)
            self._ends.add(message.sampling_params.stop_token_ids)
            self.num_bytes += (
                REQUEST_BYTES
                + event.num_prompt_bytes
                + len(message.block_hashes)
                + len(message.output_token_ids)
                + len(message.predicted_token_ids)
                + len(message.request_id)
                + LISTED_BYTES * len(message.sampling_params.stop_token_ids)
                + sum(EVENT_BYTES + len(item.places) for item in message.encoder_inputs)
            )

    def _drop_tokens(self) -> None:
        recent, self._recent = self._recent, []
        frames = [event.result.sampled_token_ids for event in recent]
        frames = [frame[: len(frame) // 4 * 4] for frame in frames]
        token_ids = int32_view(b"".join(frames))
        ends = np.cumsum([len(frame) // 4 for frame in frames])
        hits = self._find_stops(token_ids)
        for event, frame in zip(recent, frames, strict=True):
            event.num_tokens = len(frame) // 4
            event.result = result_without_content(event.result)
        if not len(hits):
            return
        owners = np.searchsorted(ends, hits, "right")
        for index in sorted(set(owners.tolist())):
            event = recent[index]
            positions = hits[owners == index]
            starts = ends[index] - event.num_tokens
            event.stops = int32_pairs(positions - starts, token_ids[positions])

    def _find_stops(self, token_ids: Int32Array) -> Int64Array:
        """Return the positions of tokens at which some request of this segment stops."""
        stops = set(chain.from_iterable(self._ends))
        if len(stops) > FEW_STOPS:
            return contains(stops, token_ids).nonzero()[0]
        is_stop = np.zeros(len(token_ids), np.bool_)
        for token_id in stops:
            is_stop |= token_ids == token_id
        return is_stop.nonzero()[0]

    def end_turn(self, scheduler: Scheduler) -> None:
        """Begin the next segment if the last one is full. Do other work for which there is time now."""
        self._drop_content()
        is_full = self.num_bytes > self.segment_bytes
        if self._num_recent_bytes > UNFLUSHED_BYTES or (
            is_full and len(self._decided) > MAX_UNFLUSHED
        ):
            self.flush()
        elif is_full:
            self.roll_over(scheduler)
        elif (start := self.segments[-1].start) is not None:
            start.continue_copies()

    def roll_over(self, scheduler: Scheduler) -> None:
        """Begin the next segment with the scheduler's current state, unless capturing it would take too long."""
        requests = scheduler.requests
        start = None
        if len(requests) <= MAX_FROZEN_REQUESTS and not self.problem:
            try:
                scheduler.slots.flush()
                start = FrozenState(scheduler)
            except Exception as error:
                # Whatever fails here must not affect requests.
                self.problem = f"{type(error).__name__}: {error}"
        if start is None and self.num_bytes <= MAX_SEGMENT_GROWTH * self.segment_bytes:
            return
        self.flush()
        self._ends = {request.stop_token_ids for request in requests.values()}
        if len(self.segments) == self.segments.maxlen:
            old = self.segments[0]
            self._outdated = [old.events]
            if old.start is not None:
                self._outdated += old.start.take_containers(FREED_PER_STEP)
        initial_hash = self.decision_hash.value
        self.decision_hash = DecisionHash(initial_hash)
        self.segments.append(Segment(start, start is not None, initial_hash))
        self.events = self.segments[-1].events
        # Keep a segment without an initial state short, so that capturing is tried again soon.
        self.num_bytes = 0 if start is not None else self.segment_bytes

    def ask(
        self,
        call: str,
        about: int | tuple[int, int],
        usual: object,
        answer: Callable[[], Any],
        keep: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Return `answer()`, and record it unless it is the usual one (see `external.Ask`)."""
        try:
            value = answer()
            kept = keep(value)
        except Exception:
            self.add_event(Answer(call, about, raised=True))
            raise
        if kept != usual:
            self.add_event(Answer(call, about, kept), len(kept) if isinstance(kept, bytes) else 0)
        return value

    def record_hashes(self, hash_blocks: HashBlocks) -> HashBlocks:
        """Return a function that calls `hash_blocks` and records the digests; a replay has no tokens to hash."""

        def hash_recorded(
            token_ids: Int32Array, block_size: int, parent: bytes, inputs: Sequence[PlacedInput]
        ) -> bytes:
            digests: bytes = self.ask(
                HASH_BLOCKS,
                len(token_ids) // block_size,
                None,
                lambda: hash_blocks(token_ids, block_size, parent, inputs),
            )
            return digests

        return hash_recorded
