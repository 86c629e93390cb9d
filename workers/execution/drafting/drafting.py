"""Propose drafts after each step, and verify them in the next one.

Shapes: S requests of a step, T their last tokens and drafts, R sampled rows, E elements of a token's hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import Int32Array, int32_view
from ....protocol.config import SpeculativeConfig
from ....protocol.worker_messages import (
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from ...batch import PersistentBatch, SlotArray, StepPlan
from ...cpu.drafts import Drafts
from ...cpu.library import NotSupportedNatively
from ...device.dtypes import AnyArray
from ..kv_cache import KVCache
from ..request_states import RequestStates
from ..runner import GrammarSource
from .computed import ComputedRows
from .verification import LogitsOf, choose_verified, plan_verification

if TYPE_CHECKING:
    from ..model_loader import Model
    from .draft_head import DraftHead
    from .draft_model import DraftModel

logger = logging.getLogger(__name__)


class Drafting:
    """The drafts of a worker's requests, from earlier text or from a draft model.

    `drafts` holds them. The draft model has been prepared for the batch.
    """

    def __init__(
        self,
        drafts: Drafts,
        model: Model,
        requests: RequestStates,
        kv_cache: KVCache,
        draft_model: DraftModel | DraftHead | None = None,
    ) -> None:
        self.drafts = drafts
        self._model = model
        self._requests = requests
        self._batch = requests.batch
        self._kv_cache = kv_cache
        self._draft_model = draft_model
        self._seconds, self._passes = 0.0, 0

    def release_slots(self, output: SchedulerOutput) -> None:
        """Remove the drafts of requests that leave their slots, before a step's changes are applied."""
        if output.removed_slots:
            self.drafts.remove_requests(int32_view(output.removed_slots))

    def execute(
        self, output: SchedulerOutput, run: Callable[[], ModelRunnerOutput]
    ) -> ModelRunnerOutput:
        """Apply the step's changes of requests, call `run`, and add the time that it took to its result."""
        if output.new_requests:
            self.drafts.add_requests(output.new_requests)
        if output.draft_limits:
            self.drafts.set_limits(int32_view(output.draft_limits))
        if self._draft_model is not None:
            self._draft_model.apply_output(output)
        began, self._seconds, self._passes = perf_counter(), 0.0, 0
        result = run()
        result.draft_seconds, result.draft_passes = self._seconds, self._passes
        if not output.grammar_slots:
            # With a grammar, the measured time would include waiting for the bitmasks.
            result.seconds = perf_counter() - began - self._seconds
        return result

    def await_grammar(self, await_grammar: GrammarSource, step: int) -> GrammarOutput | None:
        """Wait for the step's grammar message and return it. The tokens that grammars force are stored as drafts."""
        message = await_grammar(step)
        if message is not None and message.forced is not None:
            self.drafts.set_forced_tokens(message.forced)
        return message

    def count(self, output: SchedulerOutput, slots_S: SlotArray) -> Int32Array | None:
        """Return how many drafts of each row to verify, or None if there are none."""
        if not output.drafts:
            return None
        rows, counts = int32_view(output.drafts).reshape(-1, 2).T
        if output.draft_token_ids:
            self.drafts.set_drafts(slots_S[rows], counts, int32_view(output.draft_token_ids))
        return count_drafts(output, slots_S, self._batch, self._kv_cache)

    def plan(self, output: SchedulerOutput, slots_S: SlotArray) -> StepPlan:
        """Return the plan of a step that computes each request's last token and its drafts."""
        num_drafts_S = self.count(output, slots_S)
        assert num_drafts_S is not None
        num_drafts_S = np.minimum(num_drafts_S, self.drafts.num_drafts(slots_S))
        return plan_verification(self._requests, slots_S, num_drafts_S)

    def verify(
        self,
        output: SchedulerOutput,
        plan: StepPlan,
        hidden_TD: AnyArray,
        await_grammar: GrammarSource,
    ) -> ModelRunnerOutput:
        """Return the accepted and sampled tokens of a step that `plan` describes, and propose the next drafts.

        `await_grammar` must call the method of that name.
        """
        num_predicted_S = self.drafts.num_from_prediction(plan.slots_S)
        logits_of = self._logits_of(plan, hidden_TD)
        grammar = self._requests.await_bitmasks(output, await_grammar)
        result = choose_verified(
            self._requests, plan, logits_of, grammar, output.step, num_predicted_S
        )
        self.drafts.look_up(plan.slots_S)
        starts_S, counts_S = plan.query_start_loc[:-1], int32_view(result.num_sampled)
        hidden_TE = self._model.kept_hidden_TE
        computed = ComputedRows(plan.slots_S, plan.num_computed_S, counts_S, starts_S, hidden_TE)
        states = self._requests.hidden_states.collect(plan, hidden_TD, counts_S)
        if states is not None:
            states.add_to(result)
        self.run_draft_model(computed, samples=True)
        result.drafts = self.drafts.get_found(output.step)
        return result

    def _logits_of(self, plan: StepPlan, hidden_TD: AnyArray) -> LogitsOf:
        """Return the function that `choose_verified` calls for logits.

        Logits take much memory. There are at most as many rows of them as in a step without drafts.
        """
        if len(plan.slots_T) > self._batch.num_slots:
            return lambda rows: self._model.compute_logits(hidden_TD[rows], plan.slots_T[rows])
        logits_TV = self._model.compute_logits(hidden_TD, plan.slots_T)
        return lambda rows: logits_TV[rows]

    def follow(
        self, output: SchedulerOutput, plan: StepPlan, slots_R: Int32Array
    ) -> DraftTokenIds | None:
        """Propose drafts after a step without drafts that sampled tokens for `slots_R`."""
        starts_S = plan.query_start_loc[:-1]
        counts_S = np.diff(plan.query_start_loc)
        begins_S = plan.seq_lens_S - counts_S
        hidden_TE = self._model.kept_hidden_TE
        computed = ComputedRows(plan.slots_S, begins_S, counts_S, starts_S, hidden_TE)
        if len(slots_R) < len(plan.slots_S):
            # The next step continues a partial prompt, so not all requests decode and no drafts are verified.
            self.drafts.drop_drafts(slots_R)
            self.run_draft_model(computed, samples=False)
            return None
        self.drafts.look_up(slots_R)
        self.run_draft_model(computed, samples=True)
        return self.drafts.get_found(output.step)

    def run_draft_model(self, computed: ComputedRows, *, samples: bool) -> None:
        """Run the draft model, if there is one, for the tokens of a step.

        If `samples` is false, the step sampled nothing, and no drafts are proposed.
        """
        if self._draft_model is None:
            return
        began = perf_counter()
        self._passes = self._draft_model.propose(computed, self.drafts, samples=samples)
        if self._passes:
            self._seconds = perf_counter() - began


def count_drafts(
    output: SchedulerOutput, slots_S: SlotArray, batch: PersistentBatch, kv_cache: KVCache
) -> Int32Array:
    """Return how many drafts of each row a step with drafts verifies, if the worker has as many."""
    return kv_cache.limit_drafts(batch.num_drafts(output)[slots_S], batch.num_tokens[slots_S])


def tokens_by_row(result: ModelRunnerOutput, plan: StepPlan) -> NDArray[Any]:
    """Return the tokens of each request of a verified plan, int32, followed by -1 for those that were not sampled."""
    counts_S = int32_view(result.num_sampled)
    most = int(np.diff(plan.query_start_loc).max())
    tokens_SK = np.full((len(counts_S), most), -1, np.int32)
    tokens_SK[np.arange(most) < counts_S[:, None]] = int32_view(result.sampled_token_ids)
    return tokens_SK


def find_drafts(speculative: SpeculativeConfig, batch: PersistentBatch) -> Drafts | None:
    """Return the drafts for a model in torch; None if the native library, which looks them up, is missing."""
    try:
        return Drafts(speculative, batch)
    except NotSupportedNatively as reason:
        logger.warning("%s; drafts are disabled", reason)
        return None
