"""Denoise the blocks of block-diffusion models.

A pass of a request computes its last block, in which unknown tokens are masks. A rule fixes some of them. When no mask
is left, the worker reports the tokens of the block, and the next pass computes the block's keys and values together
with the next block. The state of a block is only in the worker: a request that returns to a slot begins its block
again, and chooses the same tokens.

Shapes: N slots, R blocks of a pass, B tokens of a block, T tokens of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import BoolArray, Float32Array, Int32Array, float32_bytes, int32_bytes
from ....protocol.config import SchedulerConfig
from ....protocol.config.diffusion import BlockDiffusion
from ....protocol.sampling_params import SamplingParams
from ....protocol.worker_messages import ModelRunnerOutput, RowLogprobs, SchedulerOutput
from ...batch import StepPlan
from ...device.dtypes import AnyArray
from ...sampling.sampler import NOTHING_ALLOWED_MESSAGE
from ..model_loader import Model
from ..request_states import RequestStates
from .candidates import LEAST_LOGPROB, Candidates, CandidateSampler, Places
from .rules import Pass, make_rule


class _Report(NamedTuple):
    """The log-probabilities of each token of a block and its alternatives, from the pass that fixed it."""

    listed_BW: Int32Array
    logprobs_BW: Float32Array
    ranks_B: Int32Array


class _BlockPlace(NamedTuple):
    """The positions of blocks. `ends_R` are the ends of the masks of each request, which include its block."""

    columns_RB: NDArray[np.int_]
    ends_R: NDArray[np.int_]


class Denoising:
    """The blocks that the requests in a worker's slots are denoising."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockDiffusion,
        model: Model,
        requests: RequestStates,
    ) -> None:
        self._model = model
        self._batch = requests.batch
        self._rule = make_rule(config)
        self._blocks = blocks
        size = blocks.block_size
        self._mask = blocks.mask_token_id
        num_slots = requests.batch.num_slots
        settings = config.dllm_algorithm_config
        penalty = settings.penalty_lambda if self._rule.reads_fixed else 0.0
        self._candidates = CandidateSampler(
            requests.sampler, self._mask, max(num_slots, size), penalty
        )
        self._first_N = np.full(num_slots, -1, np.int32)
        """The number of tokens that each slot had when its block began."""
        self._is_mask_NB: BoolArray = np.zeros((num_slots, size), np.bool_)
        self._num_edits_N = np.zeros(num_slots, np.int32)
        self._num_listed: dict[int, int] = {}
        """The slots that report log-probabilities, and the number of alternatives."""
        self._reports: dict[int, _Report] = {}

    def begin(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Write the masks of the blocks that begin in a step."""
        for new in output.new_requests:
            self._first_N[new.slot] = -1
            self._num_listed.pop(new.slot, None)
            if new.sampling_params.logprobs is not None:
                self._num_listed[new.slot] = _num_alternatives(
                    new.sampling_params, self._model.spec.num_token_ids
                )
        slots_R = plan.slots_S[plan.sampling_rows]
        for slot in slots_R[self._first_N[slots_R] != self._batch.num_tokens[slots_R]].tolist():
            first = self._batch.num_tokens[slot]
            place = self._place(np.array([slot]), np.array([first]))
            self._batch.host_token_ids_NL[slot, first : place.ends_R[0]] = self._mask
            self._is_mask_NB[slot] = place.columns_RB[0] >= first
            self._first_N[slot] = first
            self._num_edits_N[slot] = 0
            self._reports.pop(slot, None)

    def finish(
        self, output: SchedulerOutput, plan: StepPlan, hidden_TD: AnyArray
    ) -> ModelRunnerOutput:
        """Fix tokens by the hidden states of a step. Return the tokens of the blocks that are complete."""
        slots_R = plan.slots_S[plan.sampling_rows]
        if not len(slots_R):
            return ModelRunnerOutput(output.step)
        blocks, tokens_NL = self._blocks, self._batch.host_token_ids_NL
        first_R = self._first_N[slots_R]
        columns_RB, ends_R = self._place(slots_R, first_R)
        is_generated_RB = columns_RB >= first_R[:, None]
        is_mask_RB = self._is_mask_NB[slots_R]
        has_candidate_RB = is_generated_RB if self._rule.reads_fixed else is_mask_RB
        rows, offsets = has_candidate_RB.nonzero()
        tokens_RB = tokens_NL[slots_R[:, None], columns_RB]
        # The row of position 0 of each sequence, or of the position before it.
        origins_R = plan.query_start_loc[plan.sampling_rows + 1] - ends_R - blocks.predicts_next
        places = Places(
            (origins_R[:, None] + columns_RB)[rows, offsets],
            slots_R[rows],
            columns_RB[rows, offsets].astype(np.int32),
            np.where(offsets > 0, tokens_RB[rows, offsets - 1], np.int32(-1)),
        )
        found = self._candidates.sample(
            places,
            lambda rows_T: self._model.compute_logits(hidden_TD[rows_T], plan.slots_T[rows_T]),
        )
        candidates_RB = np.zeros_like(tokens_RB)
        candidates_RB[rows, offsets] = np.maximum(found.token_ids, 0)
        confidence_RB = np.full(tokens_RB.shape, LEAST_LOGPROB)
        confidence_RB[rows, offsets] = found.logprobs[:, 0]
        num_edits_R = self._num_edits_N[slots_R]
        chosen = self._rule.choose(
            Pass(tokens_RB, candidates_RB, confidence_RB, is_generated_RB, is_mask_RB, num_edits_R)
        )
        self._num_edits_N[slots_R] += ~is_mask_RB.any(1)
        tokens_RB = np.where(chosen.is_fixed_RB, candidates_RB, tokens_RB)
        tokens_NL[slots_R[:, None], columns_RB] = tokens_RB
        self._is_mask_NB[slots_R] = is_mask_RB & ~chosen.is_fixed_RB
        self._keep_logprobs(places, offsets, chosen.is_fixed_RB[rows, offsets], found)
        is_new_RB = is_generated_RB & chosen.is_complete_R[:, None]
        counts_R = is_new_RB.sum(1).astype(np.int32)
        self._batch.num_tokens[slots_R] += counts_R
        return ModelRunnerOutput(
            output.step,
            sampled_token_ids=int32_bytes(tokens_RB[is_new_RB]),
            num_sampled=counts_R.tobytes(),
            logprobs=[
                self._report(slot, blocks.block_size - count)
                for slot, count in zip(slots_R.tolist(), counts_R.tolist(), strict=True)
                if count and slot in self._num_listed
            ],
            nan_slots=int32_bytes(found.find_damaged(places.slots)),
            failed_slots=[
                (slot, NOTHING_ALLOWED_MESSAGE) for slot in found.find_failed(places.slots)
            ],
        )

    def _place(self, slots_R: Int32Array, first_R: Int32Array) -> _BlockPlace:
        """Return the positions of blocks, given the number of tokens of their slots when they began."""
        blocks = self._blocks
        origins_R = self._batch.num_prompt_tokens[slots_R] if blocks.answer_size else 0
        done_R = first_R - origins_R
        starts_R = first_R - done_R % blocks.block_size
        unit = blocks.answer_size or blocks.block_size
        return _BlockPlace(
            starts_R[:, None] + np.arange(blocks.block_size), first_R - done_R % unit + unit
        )

    def _keep_logprobs(
        self, places: Places, offsets: NDArray[np.intp], is_fixed: BoolArray, found: Candidates
    ) -> None:
        """Store the log-probabilities of the tokens that a pass fixed, for requests that want them."""
        for slot in self._num_listed.keys() & set(places.slots.tolist()):
            rows = np.flatnonzero((places.slots == slot) & is_fixed)
            width = 1 + self._num_listed[slot]
            report = self._reports.setdefault(slot, self._empty_report(width))
            at = offsets[rows]
            report.listed_BW[at] = found.listed[rows, :width]
            report.logprobs_BW[at] = found.logprobs[rows, :width]
            report.ranks_B[at] = found.ranks[rows]

    def _empty_report(self, width: int) -> _Report:
        size = self._blocks.block_size
        return _Report(
            np.zeros((size, width), np.int32),
            np.zeros((size, width), np.float32),
            np.zeros(size, np.int32),
        )

    def _report(self, slot: int, first: int) -> RowLogprobs:
        """Return the log-probabilities of the tokens of a complete block from offset `first` on."""
        listed_BW, logprobs_BW, ranks_B = self._reports.pop(slot)
        return RowLogprobs(
            slot,
            len(ranks_B) - first,
            int32_bytes(listed_BW[first:]),
            float32_bytes(logprobs_BW[first:]),
            int32_bytes(ranks_B[first:]),
        )


def _num_alternatives(params: SamplingParams, vocab_size: int) -> int:
    count = params.logprobs or 0
    return (vocab_size if count < 0 else count) + len(params.logprob_token_ids or ())
