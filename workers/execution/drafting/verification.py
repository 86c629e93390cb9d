"""Verify drafts with models in torch: one pass computes all drafts, then tokens are sampled one after the other.

Shapes: S requests of a step, T their last tokens and drafts, K sampled tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import BoolArray, Int32Array, Int64Array, contains
from ....protocol.worker_messages import ModelRunnerOutput
from ...batch import SlotArray, StepPlan, plan_chunks
from ...cpu.drafts import count_predictions
from ...device.dtypes import AnyArray, on_host
from ...sampling import Grammar, Logprobs, SamplerOutput
from ..request_states import RequestStates


def plan_verification(
    requests: RequestStates, slots_S: SlotArray, num_drafts_S: Int32Array
) -> StepPlan:
    """Return the plan of a step that computes the last token of each request and the drafts after it."""
    batch = requests.batch
    plan = plan_chunks(slots_S, batch.num_tokens[slots_S] - 1, 1 + num_drafts_S)
    if batch.rotary is not None:
        plan.rotary_T3 = batch.rotary.of_step(plan.slots_S, plan.query_start_loc, plan.positions_T)
    return plan


def choose_verified(
    requests: RequestStates,
    plan: StepPlan,
    logits_TV: AnyArray,
    grammar: Grammar | None,
    step: int,
    num_predicted_S: Int32Array,
) -> ModelRunnerOutput:
    """Sample a token after the last token of each request, and after each draft that was sampled itself.

    The sampled tokens are appended to the batch, and replace drafts that were not sampled. The n-th tokens of all
    requests are sampled together, because each depends on the previous one.

    Args:
        requests: The states of the requests.
        plan: The result of `plan_verification`.
        logits_TV: The logits of the plan's tokens.
        grammar: The tokens that requests with a grammar may sample.
        step: The number of the step.
        num_predicted_S: How many drafts of each request come from a prediction of the client.
    """
    batch, sampler = requests.batch, requests.sampler
    starts_S, ends_S = plan.query_start_loc[:-1], plan.query_start_loc[1:]
    slots_S = plan.slots_S
    drafts_T = on_host(batch.input_ids(plan)).copy()
    found = _Sampled(len(slots_S))
    rows = np.arange(len(slots_S))
    for place in range(int((ends_S - starts_S).max())):
        rows_T = starts_S[rows] + place
        slots = slots_S[rows]
        allowed = None if grammar is None else _grammar_at(grammar, slots, place)
        sampled = sampler.sample(logits_TV[rows_T], slots, batch.num_tokens[slots], allowed)
        batch.append_tokens(slots, sampled.token_ids)
        wants_S: BoolArray = sampler.describe(slots).state.wants_logprobs[slots]
        found.add(rows, sampled, wants_S)
        has_draft = rows_T + 1 < ends_S[rows]
        rows_T, rows = rows_T[has_draft], rows[has_draft]
        rows = rows[on_host(sampled.token_ids)[has_draft] == drafts_T[rows_T + 1]]
        if not len(rows):
            break
    batch.num_computed_tokens[slots_S] = batch.num_tokens[slots_S] - 1
    num_verified_S = (ends_S - starts_S - 1).astype(np.int32)
    num_sampled_S = found.num_sampled_S
    metadata = sampler.describe(slots_S)
    output = SamplerOutput(found.tokens_K, metadata, found.logprobs, num_sampled_S).message(step)
    output.num_sampled, output.num_verified = num_sampled_S.tobytes(), num_verified_S.tobytes()
    if num_predicted_S.any():
        output.prediction_counts = count_predictions(
            slots_S.astype(np.int64), num_predicted_S, num_sampled_S, num_verified_S
        )
    return output


def _grammar_at(grammar: Grammar, slots: Int32Array, place: int) -> Grammar | None:
    """Return the bitmasks of these slots after `place` drafts."""
    is_in_G = contains(slots.tolist(), grammar.slots_G)
    if not is_in_G.any():
        return None
    return Grammar(
        grammar.slots_G[is_in_G], grammar.first_rows_G[is_in_G] + place, grammar.bitmask_NK
    )


@dataclass(slots=True)
class _Sampled:
    """Collects the tokens of `num_rows` requests, sampled in any order, and the log-probabilities of some."""

    num_rows: int
    _rows: list[NDArray[Any]] = field(default_factory=list)
    _tokens: list[Int64Array] = field(default_factory=list)
    _logprob_rows: list[NDArray[Any]] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, rows: NDArray[Any], sampled: SamplerOutput, wants: BoolArray) -> None:
        """Add one token for each of `rows`, with log-probabilities for the rows that want them."""
        self._rows.append(rows)
        self._tokens.append(on_host(sampled.raw_token_ids).astype(np.int64))
        if sampled.raw_logprobs is not None:
            self._logprob_rows.append(rows[wants])
            self._logprobs.append(sampled.raw_logprobs)

    @property
    def num_sampled_S(self) -> Int32Array:
        """The number of tokens of each request."""
        return np.bincount(np.concatenate(self._rows), minlength=self.num_rows).astype(np.int32)

    @property
    def tokens_K(self) -> Int64Array:
        """Return the tokens, ordered by request."""
        order = np.argsort(np.concatenate(self._rows), kind="stable")
        tokens: Int64Array = np.concatenate(self._tokens)[order]
        return tokens

    @property
    def logprobs(self) -> Logprobs | None:
        """Return the log-probabilities in the order of the tokens; None if no request wants any."""
        if not self._logprobs:
            return None
        order = np.argsort(np.concatenate(self._logprob_rows), kind="stable")
        width = max(each.token_ids.shape[1] for each in self._logprobs)

        def joined(arrays: list[AnyArray]) -> NDArray[Any]:
            padded = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in map(on_host, arrays)]
            return np.concatenate(padded)[order]

        ranks = np.concatenate([on_host(each.ranks) for each in self._logprobs])[order]
        return Logprobs(
            joined([each.token_ids for each in self._logprobs]),
            joined([each.logprobs for each in self._logprobs]),
            ranks,
        )
