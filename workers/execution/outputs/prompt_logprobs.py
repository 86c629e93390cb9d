"""Compute the log-probabilities of prompts, chunk by chunk, and send them with the first token.

Shapes: T tokens of a step, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from ....protocol.arrays import Int32Array
from ....protocol.worker_messages import RowLogprobs
from ...batch import PersistentBatch, StepPlan
from ...device.dtypes import AnyArray, as_tensor
from ...sampling import prompt_logprobs

POSITIONS_AT_ONCE: Final = 64
"""Maximum number of rows of logits, float32 over the whole vocabulary, that are in memory at a time."""


PromptScore: TypeAlias = Callable[[int, AnyArray, AnyArray, int, Sequence[int]], RowLogprobs]


def _score_in_torch(
    slot: int, logits_TV: AnyArray, following_T: AnyArray, count: int, listed: Sequence[int]
) -> RowLogprobs:
    following_T = as_tensor(following_T).long()
    return prompt_logprobs(slot, as_tensor(logits_TV), following_T, count, listed)


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
        self._alternatives: dict[int, tuple[int, Sequence[int]]] = {}
        self._parts: dict[int, list[RowLogprobs]] = {}

    def add_request(self, slot: int, count: int, listed: Sequence[int]) -> None:
        """Collect `count` alternatives (-1: the whole vocabulary) and `listed` tokens at every prompt position."""
        self._alternatives[slot] = count, listed
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
            first = int(plan.num_computed_S[row])
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
                self._parts[slot].append(
                    self._score(slot, logits_TV, following_T, *self._alternatives[slot])
                )

    def finish(self, slots: list[int]) -> list[RowLogprobs]:
        """Return the log-probabilities of those `slots` that sample their first token now, and remove them."""
        finished = []
        for slot in self._alternatives.keys() & set(slots):
            finished += self._parts[slot]
            self.remove_request(slot)
        return finished
