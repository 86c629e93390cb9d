"""Correct the token counts of a step for rejected drafts, and drop the tokens after a stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32Array, Int64Array, int32_view
from ....protocol.errors import EngineError
from ....protocol.messages import SpecDecodingStats
from ....protocol.worker_messages import ModelRunnerOutput
from ...state.batch import Batch
from ...state.running_requests import RunningRequests


class SampledTokens(NamedTuple):
    """The tokens that a step sampled: `counts[i]` of them for row i.

    `cut` maps each slot that stopped early to the number of tokens that are kept.
    """

    token_ids: Int32Array
    counts: Int64Array
    cut: dict[int, int]


class VerifiedDrafts(NamedTuple):
    """The number of sampled tokens and of verified drafts per row of a step."""

    counts: Int64Array
    num_verified: Int64Array

    @classmethod
    def from_output(cls, output: ModelRunnerOutput, num_drafts: Int64Array) -> VerifiedDrafts:
        """Return the numbers in an output. Without them, each row has one token, and all drafts were verified.

        Raises:
            EngineError: More drafts were verified than scheduled.
        """
        counts: Int64Array = np.ones(len(num_drafts), np.int64)
        if output.num_sampled:
            counts = int32_view(output.num_sampled).astype(np.int64)
        num_verified = num_drafts
        if output.num_verified:
            num_verified = int32_view(output.num_verified).astype(np.int64)
            if len(num_verified) != len(num_drafts) or (num_verified > num_drafts).any():
                raise EngineError(
                    f"step {output.step} verified {num_verified.tolist()} drafts of rows with {num_drafts.tolist()}"
                )
        return cls(counts, num_verified)

    def is_valid(self, num_rows: int, num_tokens: int, least: int = 1) -> bool:
        """Return whether the rows have `num_tokens` in all.

        Each must have at least `least` of them, and at most one more than its verified drafts.
        """
        counts, num_verified = self
        return (
            len(counts) == num_rows
            and int(counts.sum()) == num_tokens
            and int(counts.min(initial=least)) >= least
            and not (counts > num_verified + 1).any()
        )


def subtract_rejections(
    running: RunningRequests,
    sampling: Batch,
    counts: Int64Array,
    num_drafts: Int64Array,
    num_verified: Int64Array,
    stats: SpecDecodingStats,
) -> None:
    """Subtract rejected drafts from the token counts, which were advanced as if all drafts were accepted.

    Each row had `num_drafts` scheduled drafts, of which `num_verified` were available to the workers.
    """
    state, slots = running.slots, sampling.slots
    rejected = num_drafts + 1 - counts
    num_computed, num_expected = state.num_computed_tokens, state.num_expected_tokens
    num_computed[slots] -= rejected
    num_expected[slots] -= rejected
    accepted = counts[num_verified > 0] - 1
    if not len(accepted):
        return
    stats.num_drafts += len(accepted)
    stats.num_draft_tokens += int(num_verified.sum())
    stats.num_accepted_tokens += int(accepted.sum())
    per_position = stats.num_accepted_tokens_per_pos
    per_position += [0] * (int(num_verified.max()) - len(per_position))
    # Rows with more than `position` accepted drafts.
    num_rows = 0
    by_count = np.bincount(accepted).tolist()
    for position in range(len(by_count) - 2, -1, -1):
        num_rows += by_count[position + 1]
        per_position[position] += num_rows


def cut_after_stops(
    running: RunningRequests, sampling: Batch, token_ids: Int32Array, counts: Int64Array
) -> SampledTokens:
    """Drop the tokens after the first one that finishes a request."""
    state, slots = running.slots, sampling.slots
    may_stop = state.may_stop(token_ids)
    if not may_stop.any():
        return SampledTokens(token_ids, counts, {})
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    last = np.cumsum(counts) - 1
    is_inner = np.ones(len(token_ids), np.bool_)
    is_inner[last] = False
    candidates = (may_stop & is_inner).nonzero()[0]
    first = last + 1 - counts
    cut: dict[int, int] = {}
    for position in candidates.tolist():
        row = int(row_of_token[position])
        slot = int(slots[row])
        request = running[slot]
        num_kept = position - int(first[row]) + 1
        num_output = int(state.num_output_tokens[slot]) + num_kept
        if slot not in cut and request.stops_at(int(token_ids[position]), num_output):
            cut[slot] = num_kept
    if not cut:
        return SampledTokens(token_ids, counts, cut)
    kept = np.array(
        [cut.get(slot, count) for slot, count in zip(slots.tolist(), counts.tolist(), strict=True)]
    )
    offsets = np.arange(len(token_ids)) - first[row_of_token]
    return SampledTokens(token_ids[offsets < kept[row_of_token]], kept, cut)


def cut_at_limits(
    running: RunningRequests, sampling: Batch, sampled: SampledTokens
) -> SampledTokens:
    """Drop the tokens of blocks after the maximum number of output tokens of their requests."""
    state, slots = running.slots, sampling.slots
    token_ids, counts, cut = sampled
    most = state.max_output_tokens[slots] - state.num_output_tokens[slots]
    kept = np.minimum(counts, most)
    if (kept == counts).all():
        return sampled
    starts = np.cumsum(counts) - counts
    is_kept = np.arange(len(token_ids)) - np.repeat(starts, counts) < np.repeat(kept, counts)
    shortened = (kept < counts).nonzero()[0]
    cut = cut | dict(zip(slots[shortened].tolist(), kept[shortened].tolist(), strict=True))
    return SampledTokens(token_ids[is_kept], kept, cut)
