"""Track the draft tokens of running requests from the proposal until a step verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from ....protocol.arrays import (
    BoolArray,
    Int32Array,
    Int64Array,
    contains,
    int32_bytes,
    int32_list,
    int32_view,
)
from ....protocol.config import SchedulerConfig, SpeculativeConfig
from ....protocol.errors import EngineError
from ....protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ....protocol.worker_messages import DraftTokenIds, ModelRunnerOutput
from ...state.batch import Batch, ScheduledRow, StepInFlight
from ...state.request import Request
from ...state.running_requests import RunningRequests
from ...state.slots import SlotArray
from ...state.steps_in_flight import StepsInFlight
from .draft_limits import DraftLimits
from .grammars import Grammars

MAX_FORCED_REQUESTS: Final = 32
"""Maximum number of requests in a step for which forced tokens are drafted; more would take the core too long."""

RECENT_STEPS: Final = 8
"""A request is assumed to have drafts again if it had any in this many last steps."""


class Drafts:
    """The latest drafts of each slot.

    With `uses_placeholders` (asynchronous scheduling), a step is scheduled before its drafts are known. A decoding
    request that had drafts recently is then scheduled with as many placeholders as its limit allows, and the workers
    insert the actual drafts.

    If the model `has_states` (recurrent layers), drafts are written only to the block of the last computed token, so
    they need no additional blocks.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        running: RunningRequests,
        grammars: Grammars,
        *,
        uses_placeholders: bool,
        has_states: bool = False,
    ) -> None:
        max_num_seqs = len(running.slots.requests)
        # A recurrent state occupies one block, that of its last token, so drafts need no blocks beyond those of the
        # step.
        self.num_lookahead_tokens = 0 if has_states else config.num_lookahead_tokens
        self._max_drafts = config.num_speculative_tokens
        self._running = running
        self._slots = running.slots
        self._grammars = grammars
        self._uses_placeholders = uses_placeholders
        self._num_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._generation: Int64Array = np.full(max_num_seqs, -1, np.int64)
        self._token_ids: Int32Array = np.zeros((max_num_seqs, self._max_drafts), np.int32)
        # With placeholders, the next step is already scheduled, with the latest drafts. Suppose that it accepts all of
        # them and samples the first forced token after them. Then the `_num_forced` tokens that follow are drafts of
        # the step after it. `_forced_token_ids` holds the whole sequence: drafts, sampled token, forced drafts.
        self._num_forced: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._forced_token_ids: Int32Array = np.zeros(
            (max_num_seqs, 2 * self._max_drafts + 1), np.int32
        )
        self.limits = DraftLimits(config, running.slots)
        self._newest_step = 0
        self._drafted_step: Int64Array = np.full(max_num_seqs, -RECENT_STEPS, np.int64)
        """The latest step after which each slot had drafts."""
        self.has_drafts = False
        """True if a running request may have drafts."""

    def count_drafts(
        self, slots: SlotArray, is_decoding: BoolArray, room: Int64Array
    ) -> Int64Array:
        """Return how many drafts of each decoding slot the next step verifies, at most `room[i]` for slot i."""
        is_known = is_decoding & (self._generation[slots] == self._slots.generation[slots])
        counts = self._num_tokens[slots]
        if self._uses_placeholders:
            is_recent = self._newest_step - self._drafted_step[slots] < RECENT_STEPS
            expected = np.where(is_recent, self.limits.largest(slots), 0)
            counts = np.maximum(np.maximum(counts, expected), self._num_forced[slots])
        return np.maximum(np.minimum(np.where(is_known, counts, 0), room), 0)

    def take_drafts(self, slots: SlotArray, counts: Int64Array) -> Int32Array:
        """Return the first `counts` drafts of each slot for a step, and discard the others."""
        if self._uses_placeholders:
            return np.zeros(0, np.int32)
        self.drop_drafts(slots)
        taken: Int32Array = self._token_ids[slots][np.arange(self._max_drafts) < counts[:, None]]
        return taken

    def drop_drafts(self, slots: SlotArray) -> None:
        """Discard the drafts of slots whose last tokens have changed."""
        if self.has_drafts:
            is_other = self._generation != self._slots.generation
            for counts in (self._num_tokens, self._num_forced):
                counts[slots] = counts[is_other] = 0
            is_recent = self._newest_step - self._drafted_step < RECENT_STEPS
            self.has_drafts = bool(
                self._num_tokens.any()
                or self._num_forced.any()
                or (self._uses_placeholders and (is_recent & ~is_other).any())
            )

    def record_step(self, step: int, num_rows: int, output: ModelRunnerOutput) -> None:
        """Record the duration of a step in which every request decoded."""
        self._newest_step = max(self._newest_step, step)
        self.limits.record_step(num_rows, output.seconds, output.draft_seconds, output.draft_passes)

    def get_drafts(self, slot: int) -> list[int]:
        """Return the latest drafts of a slot."""
        if self._generation[slot] != self._slots.generation[slot]:
            return []
        found: list[int] = self._token_ids[slot, : self._num_tokens[slot]].tolist()
        return found

    def add_drafts(
        self, rows: Sequence[ScheduledRow], in_flight: StepsInFlight
    ) -> list[ScheduledRow]:
        """Return the rows of a step, completed with the drafts that only the workers had when it was scheduled."""
        return [
            msgspec.structs.replace(row, draft_token_ids=self._last_drafts(row, in_flight))
            if row.num_drafts and row.draft_token_ids is None and row.is_awaited
            else row
            for row in rows
        ]

    def _last_drafts(self, row: ScheduledRow, in_flight: StepsInFlight) -> list[int]:
        if row.is_alive:
            return self.get_drafts(row.request.slot)[: row.num_drafts]
        return int32_list(in_flight.get_drafts(row.request))[: row.num_drafts]

    def draft_forced_tokens(self, step: StepInFlight) -> None:
        """Draft the tokens that grammars force after the tokens and drafts of a step."""
        if len(step.sampling) <= MAX_FORCED_REQUESTS:
            for row in step.constrained:
                if row.is_alive:
                    self._draft_after(row.request)

    def _draft_after(self, request: Request) -> None:
        slot, drafts = request.slot, self.get_drafts(request.slot)
        if not self._uses_placeholders and not self._are_usable(np.array([slot])).all():
            return
        forced = self._grammars.forced_tokens(request, drafts)
        if not forced:
            return
        self._generation[slot] = self._slots.generation[slot]
        self.has_drafts = True
        if self._uses_placeholders:
            # The next step is already scheduled and samples the first forced token.
            following = (drafts + forced)[: len(drafts) + 1 + self._max_drafts]
            self._forced_token_ids[slot, : len(following)] = following
            self._num_forced[slot] = len(following) - len(drafts) - 1
        else:
            following = (drafts + forced)[: self._max_drafts]
            self._token_ids[slot, : len(following)] = following
            self._num_tokens[slot] = len(following)

    def _are_usable(self, slots: SlotArray) -> BoolArray:
        """Return whether drafts can follow the known tokens, that is, no token is in flight."""
        is_usable: BoolArray = self._slots.num_expected_tokens[
            slots
        ] == self._slots.num_known_tokens(slots)
        return is_usable

    def get_forced_tokens(self, step: StepInFlight) -> DraftTokenIds | None:
        """Return the tokens forced after the last tokens of a step's constrained requests."""
        slots = [row.request.slot for row in step.constrained if row.is_alive]
        is_known = self._generation == self._slots.generation
        slots = [slot for slot in slots if self._num_forced[slot] and is_known[slot]]
        if not slots:
            return None
        counts = [len(self.get_drafts(slot)) + 1 + int(self._num_forced[slot]) for slot in slots]
        rows = zip(slots, counts, strict=True)
        token_ids = [self._forced_token_ids[slot, :count] for slot, count in rows]
        return DraftTokenIds(
            step.step, int32_bytes(slots), int32_bytes(counts), np.concatenate(token_ids).tobytes()
        )

    def store_drafts(self, batch: Batch, drafts: DraftTokenIds) -> None:
        """Store the drafts proposed after a step. Raise EngineError if the arrays do not match each other."""
        state = self._slots
        slots = int32_view(drafts.slots).astype(np.intp)
        counts = int32_view(drafts.num_tokens).astype(np.int64)
        token_ids = int32_view(drafts.token_ids)
        num_tokens = int(counts.sum())
        if len(slots) != len(counts) or num_tokens != len(token_ids) or (counts < 0).any():
            raise EngineError(
                f"step {drafts.step} returned {len(token_ids)} drafts, "
                f"{counts.tolist()} for slots {slots.tolist()}"
            )
        levels = int32_view(drafts.levels) if drafts.levels else np.zeros(len(slots), np.int32)
        is_usable = batch.is_alive(state)
        if drafts.slots != batch.slot_bytes:
            is_usable = contains(batch.slots[is_usable].tolist(), slots)
        if not self._uses_placeholders:
            is_usable &= self._are_usable(slots)
        shape = len(slots), self._max_drafts
        if (
            num_tokens == len(slots) * self._max_drafts
            and counts.max(initial=0) <= self._max_drafts
        ):
            rows = token_ids.reshape(shape)
        else:
            columns = np.arange(self._max_drafts)
            is_filled = columns < counts[:, None]
            first = np.cumsum(counts) - counts
            rows = np.zeros(shape, np.int32)
            rows[is_filled] = token_ids[(first[:, None] + columns)[is_filled]]
        if not is_usable.all():
            slots, counts, levels = slots[is_usable], counts[is_usable], levels[is_usable]
            rows = rows[is_usable]
        self._token_ids[slots] = rows
        self._num_tokens[slots] = np.minimum(counts, self._max_drafts)
        self.limits.set_levels(slots, levels)
        self._generation[slots] = state.generation[slots]
        self._newest_step = max(self._newest_step, drafts.step)
        self._drafted_step[slots[counts > 0]] = drafts.step
        self.has_drafts = True
        if self._running.num_constrained:
            self._validate(slots)

    def store_late_drafts(self, batch: Batch, drafts: DraftTokenIds) -> None:
        """Store drafts that arrived after the output of their step.

        Raises:
            EngineError: The arrays do not match each other, or drafts are placeholders. A worker that verified drafts
                unknown to the core might sample tokens that a grammar forbids.
        """
        if self._uses_placeholders:
            raise EngineError(
                f"the drafts of step {drafts.step} came after its output; with asynchronous scheduling "
                "a worker must send them with the output (or use --no-async-scheduling)"
            )
        self.store_drafts(batch, drafts)

    def _validate(self, slots: SlotArray) -> None:
        """Drop drafts that the grammars of constrained requests forbid, and all drafts of isolated grammars."""
        for slot in slots.tolist():
            request = self._running[slot]
            if request.params.structured_output is not None:
                self._num_tokens[slot] = self._grammars.num_acceptable(
                    request, self.get_drafts(slot)
                )
                if self._grammars.is_isolated(request):
                    # The workers would verify their drafts, but the bitmasks after these are not known in time.
                    self._drafted_step[slot] = -RECENT_STEPS


def make_drafts(
    config: SchedulerConfig,
    groups: Sequence[KVCacheGroup],
    running: RunningRequests,
    grammars: Grammars,
) -> Drafts | None:
    """Return an object that tracks drafts, or None without speculative decoding."""
    if config.speculative is None:
        return None
    return Drafts(
        config.speculative,
        running,
        grammars,
        uses_placeholders=config.async_scheduling,
        has_states=any(group.kind is AttentionKind.STATE_SPACE for group in groups),
    )
