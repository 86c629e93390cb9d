"""Tokens that were proposed for running requests, until a step verifies them."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..protocol.arrays import BoolArray, Int32Array, Int64Array, int32_bytes, int32_view
from ..protocol.config import SpeculativeConfig
from ..protocol.errors import EngineError
from ..protocol.messages import DraftTokenIds
from .batch import Batch, StepInFlight
from .grammars import Grammars
from .request import Request
from .running_requests import RunningRequests
from .slots import SlotArray

MOST_FORCED: Final = 32
"""In steps with more requests no tokens are forced: the worker has no time for it."""


class Drafts:
    """The last proposals for each slot.

    With `uses_placeholders` steps are scheduled before the proposals for them are known: a decoding request is taken
    to have as many as were proposed for it last, and the workers put in what they have by then.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        running: RunningRequests,
        grammars: Grammars,
        *,
        uses_placeholders: bool,
    ) -> None:
        max_num_seqs = len(running.slots.requests)
        self.num_lookahead_tokens = config.num_lookahead_tokens
        self._most = config.num_speculative_tokens
        self._running = running
        self._slots = running.slots
        self._grammars = grammars
        self._uses_placeholders = uses_placeholders
        self._num_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._generation: Int64Array = np.full(max_num_seqs, -1, np.int64)
        self._token_ids: Int32Array = np.zeros((max_num_seqs, self._most), np.int32)
        # With placeholders the next step is scheduled already, with the last drafts. If it accepts them all and samples
        # the forced token after them, `_num_forced` tokens that a grammar forces are drafts of the step after it.
        # `_forced_token_ids` has all of these: drafts, sampled token, forced drafts.
        self._num_forced: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._forced_token_ids: Int32Array = np.zeros((max_num_seqs, 2 * self._most + 1), np.int32)
        self.are_any = False
        """Whether there may be drafts for a running request."""

    def count(self, slots: SlotArray, is_decoding: BoolArray, room: Int64Array) -> Int64Array:
        """How many drafts each decoding slot may have verified, within its `room`."""
        is_known = is_decoding & (self._generation[slots] == self._slots.generation[slots])
        counts = np.maximum(self._num_tokens[slots], self._num_forced[slots])
        return np.clip(np.where(is_known, counts, 0), 0, room)

    def take(self, slots: SlotArray, counts: Int64Array) -> Int32Array:
        """The first `counts` drafts of each slot, for a step. What is left of them is of no use."""
        if self._uses_placeholders:
            return np.zeros(0, np.int32)
        self.forget(slots)
        taken: Int32Array = self._token_ids[slots][np.arange(self._most) < counts[:, None]]
        return taken

    def forget(self, slots: SlotArray) -> None:
        """Each slot has other last tokens than those that its drafts follow."""
        if self.are_any:
            is_other = self._generation != self._slots.generation
            for counts in (self._num_tokens, self._num_forced):
                counts[slots] = counts[is_other] = 0
            self.are_any = bool(self._num_tokens.any() or self._num_forced.any())

    def find(self, slot: int) -> list[int]:
        """What was proposed last for a slot."""
        if self._generation[slot] != self._slots.generation[slot]:
            return []
        found: list[int] = self._token_ids[slot, : self._num_tokens[slot]].tolist()
        return found

    def force(self, step: StepInFlight) -> None:
        """Let what grammars leave no choice about follow a step's tokens, and the drafts after them."""
        if len(step.sampling) <= MOST_FORCED:
            for row in step.constrained:
                if row.is_alive:
                    self._force(row.request)

    def _force(self, request: Request) -> None:
        slot, drafts = request.slot, self.find(request.slot)
        if not self._uses_placeholders and not self._are_usable(np.array([slot])).all():
            return
        forced = self._grammars.forced_tokens(request, drafts)
        if not forced:
            return
        self._generation[slot] = self._slots.generation[slot]
        self.are_any = True
        if self._uses_placeholders:
            # The next step is scheduled already, and samples the first of them.
            following = (drafts + forced)[: len(drafts) + 1 + self._most]
            self._forced_token_ids[slot, : len(following)] = following
            self._num_forced[slot] = len(following) - len(drafts) - 1
        else:
            following = (drafts + forced)[: self._most]
            self._token_ids[slot, : len(following)] = following
            self._num_tokens[slot] = len(following)

    def _are_usable(self, slots: SlotArray) -> BoolArray:
        """Whether drafts can follow the tokens that are known: what is in flight goes on without them."""
        is_usable: BoolArray = self._slots.num_expected_tokens[
            slots
        ] == self._slots.num_known_tokens(slots)
        return is_usable

    def forced(self, step: StepInFlight) -> DraftTokenIds | None:
        """What is forced after the last tokens of a step's constrained requests, with their drafts in it."""
        slots = [row.request.slot for row in step.constrained if row.is_alive]
        is_known = self._generation == self._slots.generation
        slots = [slot for slot in slots if self._num_forced[slot] and is_known[slot]]
        if not slots:
            return None
        counts = [len(self.find(slot)) + 1 + int(self._num_forced[slot]) for slot in slots]
        rows = zip(slots, counts, strict=True)
        token_ids = [self._forced_token_ids[slot, :count] for slot, count in rows]
        return DraftTokenIds(
            step.step, int32_bytes(slots), int32_bytes(counts), np.concatenate(token_ids).tobytes()
        )

    def propose(self, batch: Batch, drafts: DraftTokenIds) -> None:
        """Take in what was proposed after a step. Raises EngineError when the arrays do not fit together."""
        state = self._slots
        slots = int32_view(drafts.slots).astype(np.intp)
        counts = int32_view(drafts.num_tokens).astype(np.int64)
        token_ids = int32_view(drafts.token_ids)
        if len(slots) != len(counts) or (counts < 0).any() or counts.sum() != len(token_ids):
            raise EngineError(
                f"step {drafts.step} returned {len(token_ids)} drafts, "
                f"{counts.tolist()} for slots {slots.tolist()}"
            )
        first = np.cumsum(counts) - counts
        is_usable = np.isin(slots, batch.slots[batch.alive(state)])
        slots, counts, first = slots[is_usable], counts[is_usable], first[is_usable]
        if not self._uses_placeholders:
            is_usable = self._are_usable(slots)
            slots, counts, first = slots[is_usable], counts[is_usable], first[is_usable]
        columns = np.arange(self._most)
        is_filled = columns < counts[:, None]
        rows = np.zeros(is_filled.shape, np.int32)
        rows[is_filled] = token_ids[(first[:, None] + columns)[is_filled]]
        self._token_ids[slots] = rows
        self._num_tokens[slots] = np.minimum(counts, self._most)
        self._generation[slots] = state.generation[slots]
        self.are_any = True
        if self._running.num_constrained:
            self._validate(slots)

    def propose_late(self, batch: Batch, drafts: DraftTokenIds) -> None:
        """Take in what was proposed after a step, and came after its output.

        Raises EngineError as `propose` does, and with placeholders: if a worker verifies drafts that the core does
        not know, it may sample what a grammar forbids.
        """
        if self._uses_placeholders:
            raise EngineError(
                f"the drafts that follow step {drafts.step} came after its output; with asynchronous "
                "scheduling a worker must send them with it: do so, or use --no-async-scheduling"
            )
        self.propose(batch, drafts)

    def _validate(self, slots: SlotArray) -> None:
        """Drop what the grammars of constrained requests forbid."""
        for slot in slots.tolist():
            request = self._running[slot]
            if request.params.structured_output is not None:
                self._num_tokens[slot] = self._grammars.num_acceptable(request, self.find(slot))
