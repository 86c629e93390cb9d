"""Plan what the running requests compute in a step, before waiting requests are admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import BoolArray, Int64Array, contains
from ...protocol.config import SchedulerConfig
from ..kv_cache.block_tables import Growth
from ..state.slots import SlotArray
from .features.encoder_inputs import EncoderInputs, EncoderPlan
from .features.speculative import Drafts
from .features.state_checkpoints import StateCheckpoints
from .lifecycle import RequestLifecycle
from .micro_batches import MicroBatches
from .queues.partial_prefills import PartialPrefills


class RunningPlan(NamedTuple):
    """The tokens that each running request would compute in a step, as parallel arrays with one entry per row.

    `wanted` is the number of tokens that each row could compute, and `needed` the same without drafts. `granted` is
    what the limits of the step allow, and `computed` the number of computed tokens after the step. `growth` are the
    blocks that must be allocated for it. `num_prompt_tokens` of the `num_tokens` belong to prompts, and prompts that
    are admitted to the step may have `num_left` more. `share` is the maximum number of tokens of one prompt in the
    step; slightly more are allowed if that completes the prompt. `encoders` is None until a request has encoder inputs.
    """

    slots: SlotArray
    needed: Int64Array
    wanted: Int64Array
    granted: Int64Array
    computed: Int64Array
    growth: Growth
    num_tokens: int
    num_prompt_tokens: int
    num_left: int
    share: int
    encoders: EncoderPlan | None

    def num_drafts(self, samples: BoolArray) -> Int64Array:
        """Return how many drafts each row verifies, given which rows sample a token."""
        return np.where(samples, self.granted - self.needed, 0)


class RunningScheduler:
    """Plans for all running requests in array operations.

    Only requests that are computing their prompt are visited one by one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: RequestLifecycle,
        *,
        partial_prefills: PartialPrefills,
        checkpoints: StateCheckpoints,
        encoders: EncoderInputs,
        drafts: Drafts | None,
        micro_batches: MicroBatches | None,
    ) -> None:
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._lifecycle = lifecycle
        self._manager = lifecycle.manager
        self._running = lifecycle.running
        self._slots = lifecycle.running.slots
        self._queue = lifecycle.queue
        self._may_split = config.enable_chunked_prefill
        self._partial_prefills = partial_prefills
        self._checkpoints = checkpoints
        self._encoders = encoders
        self._drafts = drafts
        self._passes = lifecycle.running.passes
        self._micro_batches = micro_batches

    def plan(self, without: Sequence[int] = ()) -> RunningPlan:
        """Plan for the running requests except the slots `without`. The plan may need more blocks than are free.

        Requests that wait for the token bitmask of their grammar get no tokens.
        """
        state = self._slots
        slots = self._running.order
        if self._running.awaiting_masks:
            without = [*without, *self._running.awaiting_masks]
        if without:
            slots = slots[~contains(without, slots)]
        computed = state.num_computed_tokens[slots]
        most = state.max_computed_tokens[slots]
        needed = wanted = self._passes.count_needed(slots, computed, most)
        if self._drafts is not None and self._may_verify():
            is_decoding = (needed == 1) & ~self._is_prefilling(slots)
            room = self._manager.tables.limit_growth(slots, computed + needed, most) - computed
            drafts = self._drafts.count_drafts(slots, is_decoding, room - needed)
            # Drafts get only the tokens that all requests leave unused.
            spare = max(self._max_num_batched_tokens - int(needed.sum()), 0)
            if int(drafts.sum()) <= spare:
                wanted = needed + drafts
            else:
                wanted = needed + np.clip(spare - (np.cumsum(drafts) - drafts), 0, drafts)
        granted, share, most_of_prompts = self._limit(slots, wanted)
        encoders = None
        if self._encoders.are_in_use:
            possible = wanted
            while True:
                encoders = self._encoders.begin_plan()
                fitted = self._fit_encoder_inputs(encoders, slots, computed, granted)
                is_cut = fitted < granted
                if encoders.failed or not is_cut.any():
                    break
                # Give the unused tokens to later requests. They may then release the encoder cache space that these
                # wait for.
                possible = np.where(is_cut, fitted, possible)
                granted, share, most_of_prompts = self._limit(slots, possible)
            granted = fitted
        if self._checkpoints.are_in_use and self._running.prefilling:
            granted = self._end_on_blocks(slots, computed, granted)
        granted = self._passes.fit(granted, needed)
        computed += granted
        to_hold = computed
        computed = self._passes.count_certain(computed, granted, needed)
        if self._drafts is not None:
            to_hold = np.minimum(computed + self._drafts.num_lookahead_tokens, most)
        growth = self._manager.tables.plan_growth(slots, to_hold)
        num_tokens, num_prompt_tokens = int(granted.sum()), 0
        if self._running.prefilling:
            num_prompt_tokens = int(granted[self._is_prefilling(slots)].sum())
        return RunningPlan(
            slots,
            needed,
            wanted,
            granted,
            computed,
            growth,
            num_tokens,
            num_prompt_tokens,
            min(self._max_num_batched_tokens - num_tokens, most_of_prompts - num_prompt_tokens),
            share,
            encoders,
        )

    def _may_verify(self) -> bool:
        """Return whether the step may have drafts.

        The stages of a pipeline plan a step each on their own. So they get drafts only if all requests decode.
        """
        return self._micro_batches is None or not (self._running.prefilling or self._queue)

    def _limit(self, slots: SlotArray, wanted: Int64Array) -> tuple[Int64Array, int, int]:
        """Reduce the wanted tokens to the limits of the step, in order of admission.

        Return the granted tokens, and the maximum numbers of tokens of one prompt and of all prompts.
        """
        limits = self._partial_prefills
        prefilling = self._running.prefilling
        if self._micro_batches is not None:
            wanted = self._micro_batches.limit_decodes(slots, wanted, self._is_prefilling(slots))
        is_prefill = self._is_prefilling(slots) if prefilling else None
        num_decodes = num_tokens = int(
            (wanted if is_prefill is None else wanted[~is_prefill]).sum()
        )
        most = self._limit_prompts(num_decodes)
        num_left = min(most, self._max_num_batched_tokens - num_decodes)
        share = limits.share(num_left, len(prefilling), self._count_joining())
        if is_prefill is not None:
            wanted = limits.cap_rows(wanted, is_prefill, share)
            of_prompts = np.where(is_prefill, wanted, 0)
            if of_prompts.sum() > most:
                wanted = np.where(is_prefill, _cut_to(of_prompts, most), wanted)
            num_tokens = int(wanted.sum())
        if num_tokens > self._max_num_batched_tokens:
            wanted = _cut_to(wanted, self._max_num_batched_tokens)
        return wanted, share, most

    def _limit_prompts(self, num_decodes: int) -> int:
        """Return the maximum number of tokens of all prompts in a step that decodes `num_decodes` tokens."""
        budget = self._max_num_batched_tokens
        if not num_decodes or not self._may_split:
            return budget
        return max(self._partial_prefills.pace.limit_tokens(budget), self._passes.smallest)

    def _count_joining(self) -> int:
        """Return how many waiting prompts may start in the step; 0 if prompts do not share it."""
        limits, queue = self._partial_prefills, self._queue
        if not limits.max_num or not queue:
            return 0
        first = queue.peek_request()
        if first is None or self._lifecycle.blocked.is_probably_blocked(first):
            return 0
        max_long = len(queue)
        if limits.max_num_long:
            sizes = (self._running[slot].num_tokens for slot in self._running.prefilling)
            max_long = max(limits.max_num_long - sum(map(limits.is_long, sizes)), 0)
        return min(queue.count_joinable(max_long), self._slots.num_free)

    def _fit_encoder_inputs(
        self, plan: EncoderPlan, slots: SlotArray, computed: Int64Array, granted: Int64Array
    ) -> Int64Array:
        """Limit each request to the position up to which its encoder inputs are available."""
        fitted = granted.copy()
        spare = self._max_num_batched_tokens - int(granted.sum())
        for slot in dict.fromkeys((*self._running.prefilling, *self._encoders.decoding)):
            request = self._running[slot]
            rows = (slots == slot).nonzero()[0] if request.encoder_inputs else slots[:0]
            row = int(rows[0]) if len(rows) else -1
            if row < 0 or not granted[row]:
                continue
            start, count = int(computed[row]), int(granted[row])
            end = self._encoders.fit_inputs(
                plan, request, start, start + count, start + count + spare
            )
            fitted[row] = end - start
            spare += count - (end - start)
        return fitted

    def _end_on_blocks(
        self, slots: SlotArray, computed: Int64Array, granted: Int64Array
    ) -> Int64Array:
        """End each prompt's chunk where its state can be cached."""
        cut = granted.copy()
        for slot, num_tokens in self._running.prefilling.items():
            for row in (slots == slot).nonzero()[0].tolist():
                start, count = int(computed[row]), int(granted[row])
                num_shared = self._running[slot].num_shared_tokens
                cut[row] = self._checkpoints.cut(start, count, num_tokens, num_shared)
        return cut

    def _is_prefilling(self, slots: SlotArray) -> BoolArray:
        return contains(self._running.prefilling, slots)

    def apply_plan(self, plan: RunningPlan) -> BoolArray:
        """Apply a plan: advance counters and allocate blocks. Return which rows sample a token."""
        slots, state = plan.slots, self._slots
        samples: BoolArray = plan.granted > 0
        if plan.granted is not plan.wanted:
            samples &= plan.granted >= plan.needed
        if plan.encoders is not None:
            self._encoders.apply_plan(plan.encoders)
        state.num_computed_tokens[slots] = plan.computed
        num_expected = state.num_expected_tokens
        num_expected[slots] += samples
        if self._drafts is not None:
            num_expected[slots] += plan.num_drafts(samples)
        self._manager.tables.apply_growth(plan.growth)
        if not self._running.prefilling:
            return samples
        sampling = {*slots[samples].tolist()}
        for slot in list(self._running.prefilling):
            request = self._running[slot]
            self._manager.cache_blocks(request, int(state.num_computed_tokens[slot]))
            if slot in sampling:
                self._running.complete_prefill(request)
        return samples


def _cut_to(wanted: Int64Array, most: int) -> Int64Array:
    """Return `wanted` with later rows reduced, so that the sum is at most `most`."""
    before = np.cumsum(wanted) - wanted
    cut: Int64Array = np.clip(most - before, 0, wanted)
    return cut
