"""Compute the log-probabilities of prompts, chunk by chunk, and send them with the first token.

Shapes: T tokens of a step, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from ....protocol.arrays import Int32Array, int32_view
from ....protocol.sampling_params import PromptCandidates, SamplingParams
from ....protocol.worker_messages import RowLogprobs
from ...batch import PersistentBatch, StepPlan
from ...device.dtypes import AnyArray, as_tensor
from ...sampling import prompt_logprobs

POSITIONS_AT_ONCE: Final = 64
"""Maximum number of rows of logits, float32 over the whole vocabulary, that are in memory at a time."""


PromptScore: TypeAlias = Callable[[int, AnyArray, AnyArray, int, Int32Array], RowLogprobs]


def _score_in_torch(
    slot: int, logits_TV: AnyArray, following_T: AnyArray, count: int, listed_TK: Int32Array
) -> RowLogprobs:
    following_T = as_tensor(following_T).long()
    return prompt_logprobs(slot, as_tensor(logits_TV), following_T, count, listed_TK)


class _Alternatives:
    """The alternatives that a prompt reports: `count` of the most likely tokens (-1: all), and listed ones."""

    def __init__(self, params: SamplingParams) -> None:
        assert params.prompt_logprobs is not None
        self.count = params.prompt_logprobs
        self._fixed = np.array(params.prompt_logprob_token_ids, np.int32)
        candidates = params.prompt_candidates or PromptCandidates(0, 0, b"")
        self._first = candidates.first
        self._rows = int32_view(candidates.token_ids).reshape(-1, candidates.num_tokens or 1)
        self._num_tokens = candidates.num_tokens

    def listed(self, start: int, stop: int) -> Int32Array:
        """Return the listed tokens for the positions from `start` to `stop`, int32 [T, K]."""
        rows = np.zeros((stop - start, self._num_tokens), np.int32)
        if self._num_tokens and stop > self._first:
            begin = max(start, self._first)
            given = self._rows[begin - self._first : stop - self._first]
            # -1 stands for no candidate, whose value is not read.
            np.maximum(given, 0, out=rows[begin - start :])
        return np.concatenate((np.tile(self._fixed, (stop - start, 1)), rows), 1)


class PromptLogprobs:
    """Collects the log-probabilities of prompts.

    `compute_logits` maps hidden states [n, D] and the slots of their requests [n] to float32 logits [n, V]. `score`
    is the function that computes log-probabilities, by default `prompt_logprobs`.
    """

    def __init__(
        self,
        compute_logits: Callable[[AnyArray, Int32Array], AnyArray],
        score: PromptScore | None = None,
    ) -> None:
        self._compute_logits = compute_logits
        self._score = score or _score_in_torch
        self._alternatives: dict[int, _Alternatives] = {}
        self._parts: dict[int, list[RowLogprobs]] = {}

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Collect the alternatives that `params` ask for at every prompt position."""
        self._alternatives[slot] = _Alternatives(params)
        self._parts[slot] = []

    def remove_request(self, slot: int) -> None:
        """Discard the log-probabilities of a slot."""
        self._alternatives.pop(slot, None)
        self._parts.pop(slot, None)

    @property
    def is_pending(self) -> bool:
        """True if the log-probabilities of some prompt are not complete."""
        return bool(self._alternatives)

    def collect(self, plan: StepPlan, hidden_TD: AnyArray, batch: PersistentBatch) -> None:
        """Compute the log-probabilities of the prompt tokens that follow this step's tokens."""
        if not self._alternatives:
            return
        for row, slot in enumerate(plan.slots_S.tolist()):
            if slot not in self._alternatives:
                continue
            wanted, first = self._alternatives[slot], int(plan.num_computed_S[row])
            last_scored = int(batch.num_prompt_tokens[slot]) - 1
            end = min(int(plan.seq_lens_S[row]), last_scored)
            offset = int(plan.query_start_loc[row]) - first
            for start in range(first, end, POSITIONS_AT_ONCE):
                stop = min(start + POSITIONS_AT_ONCE, end)
                logits_TV = self._compute_logits(
                    hidden_TD[offset + start : offset + stop],
                    np.full(stop - start, slot, np.int32),
                )
                following_T = batch.tokens_at(slot, start + 1, stop + 1)
                listed_TK = wanted.listed(start, stop)
                self._parts[slot].append(
                    self._score(slot, logits_TV, following_T, wanted.count, listed_TK)
                )

    def finish(self, slots: list[int]) -> list[RowLogprobs]:
        """Return the log-probabilities of those `slots` that sample their first token now, and remove them."""
        finished = []
        for slot in self._alternatives.keys() & set(slots):
            finished += self._parts[slot]
            self.remove_request(slot)
        return finished
