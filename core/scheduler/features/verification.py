"""Correct the token counts of a step for rejected drafts, and drop the tokens after a stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32Array, Int64Array
from ....protocol.messages import SpecDecodingStats
from ...state.batch import Batch
from ...state.running_requests import RunningRequests


class SampledTokens(NamedTuple):
    """The tokens that a step sampled: `counts[i]` of them for row i.

    `cut` maps each slot that stopped early to the number of tokens that are kept.
    """

    token_ids: Int32Array
    counts: Int64Array
    cut: dict[int, int]


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
    stats.num_drafts += len(accepted)
    stats.num_draft_tokens += int(num_verified.sum())
    stats.num_accepted_tokens += int(accepted.sum())
    for position in range(int(num_verified.max(initial=0))):
        if position == len(stats.num_accepted_tokens_per_pos):
            stats.num_accepted_tokens_per_pos.append(0)
        num_accepted = np.count_nonzero(accepted > position)
        stats.num_accepted_tokens_per_pos[position] += int(num_accepted)


def cut_after_stops(
    running: RunningRequests, sampling: Batch, token_ids: Int32Array, counts: Int64Array
) -> SampledTokens:
    """Drop the tokens after the first one that finishes a request."""
    state, slots = running.slots, sampling.slots
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    last = np.cumsum(counts) - 1
    is_inner = np.ones(len(token_ids), np.bool_)
    is_inner[last] = False
    candidates = (state.may_stop(token_ids) & is_inner).nonzero()[0]
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
