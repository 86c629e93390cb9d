"""Verify drafts with models in torch: one pass computes all drafts, then tokens are sampled after them.

Shapes: S requests of a step, T their last tokens and drafts, K sampled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import BoolArray, Int32Array, Int64Array, contains
from ....protocol.worker_messages import ModelRunnerOutput
from ...batch import SlotArray, StepPlan, plan_chunks
from ...cpu.drafts import count_predictions
from ...device.dtypes import AnyArray, on_host
from ...sampling import Grammar, Logprobs, SamplerOutput, SamplingMetadata
from ..request_states import RequestStates

LogitsOf: TypeAlias = Callable[[NDArray[Any]], AnyArray]


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
    logits_of: LogitsOf,
    grammar: Grammar | None,
    step: int,
    num_predicted_S: Int32Array,
) -> ModelRunnerOutput:
    """Sample a token after the last token of each request, and after each draft that was sampled itself.

    The sampled tokens are appended to the batch, and replace drafts that were not sampled.

    Args:
        requests: The states of the requests.
        plan: The result of `plan_verification`.
        logits_of: Returns the logits of these tokens of the plan, which may be overwritten.
        grammar: The tokens that requests with a grammar may sample.
        step: The number of the step.
        num_predicted_S: The number of drafts of each request that come from a prediction of the client.
    """
    batch, sampler = requests.batch, requests.sampler
    slots_S = plan.slots_S
    metadata = sampler.describe(slots_S)
    is_bound_S = _depend_on_previous(metadata, grammar)
    counts_S = np.diff(plan.query_start_loc)
    if counts_S[~is_bound_S].sum() > batch.num_slots:
        # There would be more rows of logits than in a step without drafts.
        is_bound_S[:] = True
    found = _Sampled(len(slots_S))
    if not is_bound_S.all():
        _choose_at_once(found, requests, plan, logits_of, np.flatnonzero(~is_bound_S))
    if is_bound_S.any():
        _choose_by_place(found, requests, plan, logits_of, np.flatnonzero(is_bound_S), grammar)
    batch.num_computed_tokens[slots_S] = batch.num_tokens[slots_S] - 1
    num_verified_S = (np.diff(plan.query_start_loc) - 1).astype(np.int32)
    num_sampled_S = found.num_sampled_S
    output = SamplerOutput(found.tokens_K, metadata, found.logprobs, num_sampled_S).message(step)
    output.num_sampled, output.num_verified = num_sampled_S.tobytes(), num_verified_S.tobytes()
    if num_predicted_S.any():
        output.prediction_counts = count_predictions(
            slots_S.astype(np.int64), num_predicted_S, num_sampled_S, num_verified_S
        )
    return output


def _depend_on_previous(metadata: SamplingMetadata, grammar: Grammar | None) -> BoolArray:
    """Return which requests sample in a way that depends on their previous tokens."""
    is_bound_S: BoolArray = metadata.state.changes_logits[metadata.slots_S]
    if grammar is not None:
        is_bound_S |= np.isin(metadata.slots_S, grammar.slots_G)
    return is_bound_S


def _choose_at_once(
    found: _Sampled,
    requests: RequestStates,
    plan: StepPlan,
    logits_of: LogitsOf,
    rows: NDArray[Any],
) -> None:
    """Sample after all tokens of these requests together. No choice depends on another one."""
    batch, sampler = requests.batch, requests.sampler
    counts = np.diff(plan.query_start_loc)[rows]
    ends = np.cumsum(counts)
    starts, num_tokens = ends - counts, int(ends[-1])
    rows_T = np.arange(num_tokens) + np.repeat(plan.query_start_loc[rows] - starts, counts)
    slots_T = plan.slots_T[rows_T]
    sampled = sampler.sample(logits_of(rows_T), slots_T, plan.positions_T[rows_T] + 1)
    tokens_T = on_host(sampled.token_ids)
    # A token is sampled in vain if a draft before it was not sampled.
    is_wrong_T = np.zeros(num_tokens, np.int64)
    is_wrong_T[1:] = tokens_T[:-1] != on_host(batch.input_ids(plan))[rows_T[1:]]
    is_wrong_T[starts] = 0
    num_wrong_T = np.cumsum(is_wrong_T)
    is_sampled_T: BoolArray = num_wrong_T == np.repeat(num_wrong_T[starts], counts)
    wants_T: BoolArray = sampler.describe(slots_T).state.wants_logprobs[slots_T]
    found.add(np.repeat(rows, counts), sampled, wants_T, is_sampled_T)
    num_sampled = np.add.reduceat(is_sampled_T, starts, dtype=np.int32)
    slots = plan.slots_S[rows]
    batch.write_drafts(slots, num_sampled, tokens_T[is_sampled_T].astype(np.int32))
    batch.num_tokens[slots] += num_sampled


def _choose_by_place(
    found: _Sampled,
    requests: RequestStates,
    plan: StepPlan,
    logits_of: LogitsOf,
    rows: NDArray[Any],
    grammar: Grammar | None,
) -> None:
    """Sample the n-th tokens of these requests together, because each depends on the previous one."""
    batch, sampler = requests.batch, requests.sampler
    starts_S, ends_S = plan.query_start_loc[:-1], plan.query_start_loc[1:]
    drafts_T = on_host(batch.input_ids(plan)).copy()
    for place in range(int((ends_S - starts_S)[rows].max())):
        rows_T = starts_S[rows] + place
        slots = plan.slots_S[rows]
        allowed = None if grammar is None else _grammar_at(grammar, slots, place)
        sampled = sampler.sample(logits_of(rows_T), slots, batch.num_tokens[slots], allowed)
        batch.append_tokens(slots, sampled.token_ids)
        wants_S: BoolArray = sampler.describe(slots).state.wants_logprobs[slots]
        found.add(rows, sampled, wants_S, np.ones(len(rows), np.bool_))
        has_draft = rows_T + 1 < ends_S[rows]
        rows_T, rows = rows_T[has_draft], rows[has_draft]
        rows = rows[on_host(sampled.token_ids)[has_draft] == drafts_T[rows_T + 1]]
        if not len(rows):
            return


def _grammar_at(grammar: Grammar, slots: Int32Array, place: int) -> Grammar | None:
    """Return the bitmasks of these slots after `place` drafts."""
    is_in_G = contains(slots.tolist(), grammar.slots_G)
    if not is_in_G.any():
        return None
    return Grammar(
        grammar.slots_G[is_in_G], grammar.first_rows_G[is_in_G] + place, grammar.bitmask_NK
    )


class _Sampled(msgspec.Struct):
    """Collects the tokens of `num_rows` requests, sampled in any order, and the log-probabilities of some."""

    num_rows: int
    _rows: list[NDArray[Any]] = msgspec.field(default_factory=list)
    _tokens: list[Int64Array] = msgspec.field(default_factory=list)
    _logprob_rows: list[NDArray[Any]] = msgspec.field(default_factory=list)
    _logprobs: list[Logprobs] = msgspec.field(default_factory=list)

    def add(
        self, rows: NDArray[Any], sampled: SamplerOutput, wants: BoolArray, is_kept: BoolArray
    ) -> None:
        """Add those tokens of `rows` that are kept, with log-probabilities for the rows that want them."""
        self._rows.append(rows[is_kept])
        self._tokens.append(on_host(sampled.raw_token_ids)[is_kept].astype(np.int64))
        if (raw := sampled.raw_logprobs) is not None:
            self._logprob_rows.append(rows[wants & is_kept])
            kept = is_kept[wants]
            arrays = (raw.token_ids, raw.logprobs, raw.ranks)
            self._logprobs.append(Logprobs(*(on_host(array)[kept] for array in arrays)))

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
            padded = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in arrays]
            return np.concatenate(padded)[order]

        ranks = np.concatenate([each.ranks for each in self._logprobs])[order]
        return Logprobs(
            joined([each.token_ids for each in self._logprobs]),
            joined([each.logprobs for each in self._logprobs]),
            ranks,
        )
