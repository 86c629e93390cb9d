"""Execute steps on the CPU, where a step is complete when the call returns.

Shapes: T tokens of a step, S scheduled requests, R sampled rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...protocol.arrays import Int32Array, Int64Array, int32_view
from ...protocol.config import SpeculativeConfig
from ...protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from ..batch import SlotArray, StepPlan, even_requests
from ..cpu.decoder import NativeDecoder
from ..cpu.decoding import NativeDecoding
from ..cpu.drafts import Drafts, count_predictions
from ..device.dtypes import AnyArray, as_tensor, torch_dtype
from ..sampling import SamplerOutput, SamplingMetadata
from .denoising.denoiser import Denoiser
from .drafting.computed import ComputedRows
from .drafting.drafting import Drafting, count_drafts, find_drafts, tokens_by_row
from .drafting.verification import plan_verification
from .kv_cache import KVCache
from .outputs.hidden_states import StepStates
from .outputs.pooling import Pooled
from .request_states import RequestStates, has_chunks
from .runner import GrammarSource

if TYPE_CHECKING:
    from .drafting.draft_head import DraftHead
    from .drafting.draft_model import DraftModel
    from .model_loader import Model
    from .pipeline import Pipeline

_Inputs = tuple[AnyArray, AnyArray, list[AnyArray], list[Any]]


class HostExecution:
    """Executes steps with a native program, or with torch on the CPU.

    A native program runs a step in which every request decodes in one call, including sampling. Drafts are verified
    only in such steps, in torch as well.
    """

    def __init__(
        self,
        model: Model,
        requests: RequestStates,
        kv_cache: KVCache,
        pipeline: Pipeline,
        speculative: SpeculativeConfig | None = None,
        draft_model: DraftModel | DraftHead | None = None,
        denoising: Denoiser | None = None,
    ) -> None:
        self._model = model
        self._shard = model.shard
        self._requests = requests
        self._batch = requests.batch
        self._kv_cache = kv_cache
        self._pipeline = pipeline
        self._speculative = speculative
        self._decoding: NativeDecoding | None = None
        self._drafting: Drafting | None = None
        self._draft_model = draft_model
        self._denoising = denoising
        # The rows of the last step, if `_decoding` ran it, else None.
        self._decoded_rows: SamplingMetadata | None = None

    def profile_memory(self, utilization: float) -> None:
        """Return None, because the KV cache gets a fixed share of the free memory instead."""

    def use_kv_cache(self) -> None:
        """Prepare the decode program for the allocated KV cache."""
        if isinstance(self._model, NativeDecoder):
            self._decoding = self._model.decoding(
                self._batch, self._kv_cache.layers, self._speculative
            )
        if self._draft_model is not None:
            self._draft_model.use_batch(self._batch, self._kv_cache.num_blocks)
        drafts = self._make_drafts()
        self._drafting = None
        if drafts is not None:
            self._drafting = Drafting(
                drafts, self._model, self._requests, self._kv_cache, self._draft_model
            )

    def _make_drafts(self) -> Drafts | None:
        if self._decoding is not None:
            return self._decoding.drafts
        if self._speculative is None or not self._shard.is_last:
            return None
        if self._shard.is_first:
            return find_drafts(self._speculative, self._batch)
        # The other stages compute drafts too, so they cannot be disabled here.
        return Drafts(self._speculative, self._batch)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode with the null block, because kernels are prepared on first use."""
        for num_tokens in (min(self._batch.block_size, self._batch.max_model_len), 1):
            hidden_TD = self._forward(even_requests(num_tokens, 1))
            if not self._shard.is_last:
                self._pipeline.send_hidden(as_tensor(hidden_TD))
            elif self._model.spec.has_head:
                self._model.compute_logits(hidden_TD[-1:])
        if self._draft_model is not None:
            self._draft_model.warm_up(min(self._batch.block_size, self._batch.max_model_len - 1))

    def release_slots(self, output: SchedulerOutput) -> None:
        """Save what drafting needs from requests that leave their slots. Call this before a step's changes."""
        if self._drafting is not None:
            self._drafting.release_slots(output)

    def release_requests(self) -> None:
        """Free every slot."""
        if self._draft_model is not None:
            self._draft_model.release_requests()

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        """Compute a step and return its output."""
        if self._denoising is not None:
            return self._denoise(self._denoising, output)
        if self._speculative is not None and not self._shard.is_last:
            # The number of tokens of a slot depends on the drafts that the last stage accepted.
            self._requests.await_tokens(self._batch.slots_of(output))
            if output.drafts:
                return self._compute_drafts(output)
        if self._drafting is None:
            return self._run(output, await_grammar)
        await_grammar = partial(self._drafting.await_grammar, await_grammar)
        return self._drafting.execute(output, partial(self._run, output, await_grammar))

    def _run(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        if output.drafts and not self._shard.is_first:
            # All stages agree to verify the drafts, because the core adds none to steps with prompts.
            return self._verify(self._batch.slots_of(output), output, await_grammar)
        self._decoded_rows = rows = self._rows_to_decode(output)
        if rows is None or (self._decoding is None and not output.drafts):
            return self._execute(output, await_grammar)
        if self._decoding is None:
            return self._verify(rows.slots_S, output, await_grammar)
        begins_S = self._batch.num_tokens[rows.slots_S] - 1
        result = self._decode(self._decoding, rows, output, await_grammar)
        if self._drafting is not None:
            if self._draft_model is not None:
                computed = _decoded_rows(self._decoding, rows.slots_S, begins_S, result)
                self._drafting.run_draft_model(computed, samples=True)
            result.drafts = self._drafting.drafts.get_found(output.step)
        return result

    def _decode(
        self,
        decoding: NativeDecoding,
        rows: SamplingMetadata,
        output: SchedulerOutput,
        await_grammar: GrammarSource,
    ) -> ModelRunnerOutput:
        bitmasks = None
        if output.grammar_slots:
            bitmasks = partial(self._requests.await_bitmasks, output, await_grammar)
        num_drafts_S = num_predicted_S = None
        if self._drafting is not None:
            num_drafts_S = self._drafting.count(output, rows.slots_S)
            if num_drafts_S is not None:
                # Read the rows now, because looking up the next drafts is part of the step.
                num_predicted_S = self._drafting.drafts.num_from_prediction(rows.slots_S)
        tokens_K, num_failed, logprobs, num_sampled_S, num_verified_S = decoding.step(
            rows, num_drafts_S, bitmasks
        )
        result = ModelRunnerOutput(output.step, tokens_K.tobytes())
        if num_failed or logprobs is not None:
            sampled = SamplerOutput(tokens_K.astype(np.int64), rows, logprobs, num_sampled_S)
            result = sampled.message(output.step)
        if num_sampled_S is not None and num_verified_S is not None:
            result.num_sampled = num_sampled_S.tobytes()
            result.num_verified = num_verified_S.tobytes()
            if num_predicted_S is not None and num_predicted_S.any():
                result.prediction_counts = count_predictions(
                    rows.slots_S, num_predicted_S, num_sampled_S, num_verified_S
                )
        return result

    @torch.inference_mode()
    def _compute_drafts(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute each request's last token and its drafts, which the last stage verifies."""
        slots_S = self._batch.slots_of(output)
        rows, counts = int32_view(output.drafts).reshape(-1, 2).T
        self._batch.write_drafts(slots_S[rows], counts, int32_view(output.draft_token_ids))
        num_drafts_S = count_drafts(output, slots_S, self._batch, self._kv_cache)
        plan = plan_verification(self._requests, slots_S, num_drafts_S)
        self._pipeline.send_hidden(as_tensor(self._forward(plan)))
        self._requests.expect_verified(slots_S, num_drafts_S)
        return ModelRunnerOutput(output.step)

    @torch.inference_mode()
    def _verify(
        self, slots_S: SlotArray, output: SchedulerOutput, await_grammar: GrammarSource
    ) -> ModelRunnerOutput:
        """Compute each request's last token and its drafts with torch. Return the accepted and sampled tokens."""
        assert self._drafting is not None
        plan = self._drafting.plan(output, slots_S)
        result = self._drafting.verify(output, plan, self._forward(plan), await_grammar)
        if not self._shard.is_first:
            self._pipeline.send_tokens(as_tensor(tokens_by_row(result, plan)), has_drafts=True)
        return result

    @torch.inference_mode()
    def _denoise(self, denoising: Denoiser, output: SchedulerOutput) -> ModelRunnerOutput:
        plan = self._batch.plan(output)
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        denoising.begin(output, plan)
        return denoising.finish(output, plan, self._forward(plan))

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    @torch.inference_mode()
    def _execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        plan = self._batch.plan(output)
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        slots_R = plan.slots_S[plan.sampling_rows]
        if not self._shard.is_last:
            self._pipeline.send_hidden(as_tensor(self._forward(plan)))
            self._requests.expect_tokens(slots_R)
            return ModelRunnerOutput(output.step)
        prompt_logprobs = self._requests.prompt_logprobs
        pooled: Pooled | None = None
        states: StepStates | None = None
        if output.grammar_slots or self._requests.has_reports:
            hidden_TD = self._forward(plan)
            states = self._requests.hidden_states.collect(plan, hidden_TD)
            prompt_logprobs.collect(plan, hidden_TD, self._batch)
            pooled = self._requests.pooling.collect(plan, hidden_TD)
            samples_R = ~self._requests.pooling.find(slots_R)
            slots_R, rows_R = slots_R[samples_R], plan.logit_rows[samples_R]
            if len(slots_R):
                hidden_RD = hidden_TD[self._array(rows_R)]
                logits_RV = self._model.compute_logits(hidden_RD, slots_R)
                sampled = self._requests.sample(output, logits_RV, slots_R, await_grammar)
        else:
            inputs = self._inputs(plan)
            sampled = self._model.forward_and_sample(*inputs, plan.logit_rows, slots_R)
        result = ModelRunnerOutput(output.step)
        if len(slots_R):
            result = self._take_sampled(output, slots_R, sampled)
        if self._drafting is not None:
            result.drafts = self._drafting.follow(output, plan, slots_R)
        if pooled is not None:
            pooled.add_to(result)
        if states is not None:
            states.add_to(result)
        if output.drafts:
            result.num_verified = bytes(len(result.sampled_token_ids))
        return result

    def _take_sampled(
        self, output: SchedulerOutput, slots_R: Int32Array, sampled: SamplerOutput
    ) -> ModelRunnerOutput:
        """Append sampled tokens. Return the output of the step."""
        prompt_logprobs = self._requests.prompt_logprobs
        self._batch.append_tokens(slots_R, sampled.token_ids)
        if not self._shard.is_first:
            has_drafts = self._drafting is not None
            self._pipeline.send_tokens(as_tensor(sampled.token_ids), has_drafts=has_drafts)
        return sampled.message(output.step, prompt_logprobs.finish(slots_R.tolist()))

    def _rows_to_decode(self, output: SchedulerOutput) -> SamplingMetadata | None:
        """Return the batch rows if every slot of the step computes only its last token and drafts, else None."""
        if (self._decoding is None and self._drafting is None) or has_chunks(output):
            return None
        if self._decoding is not None and self._requests.hidden_states.is_pending:
            # The program that decodes and samples keeps no hidden states for this.
            return None
        rows = self._decoded_rows
        if output.slots is None and rows is not None and rows.is_current:
            return rows
        slots_S = self._requests.decoding_slots(output)
        return None if slots_S is None else self._requests.sampler.describe(slots_S)

    def _forward(self, plan: StepPlan) -> AnyArray:
        """Compute a step, and return its hidden states.

        Torch sums in an order that depends on the number of rows. A text encoder in torch, which computes a whole
        sequence per step, therefore runs the sequences one by one, so that a result does not depend on the batch.
        """
        if self._model.spec.is_causal or isinstance(self._model, NativeDecoder):
            return self._model.forward(*self._inputs(plan))
        return torch.cat([self._model.forward(*self._inputs(each)) for each in plan.split()])

    def _inputs(self, plan: StepPlan) -> _Inputs:
        """Return the arguments of the model's `forward`."""
        self._requests.await_tokens(plan.slots_S)
        if self._requests.loras is not None:
            self._requests.loras.begin_step(plan.slots_T)
        if self._requests.encoders is not None:
            self._model.placed = self._requests.encoders.place(plan)
        rotary_T3 = plan.rotary_T3
        self._model.rotary_T3 = None if rotary_T3 is None else self._array(rotary_T3)
        if self._model.spec.source is not None:
            reads_T = self._batch.reads_source(plan)
            self._model.reads_T1 = None if reads_T is None else torch.from_numpy(reads_T)[:, None]
        # The first stage starts from tokens, the others from the hidden states of the previous stage.
        if self._shard.is_first:
            inputs = self._array(self._batch.input_ids(plan))
            if count := self._model.spec.num_earlier_tokens:
                assert not isinstance(self._model, NativeDecoder)
                earlier_TW = self._batch.earlier_tokens(plan, count)
                self._model.earlier_TW = torch.from_numpy(earlier_TW)
        else:
            shape = (len(plan.positions_T), self._model.received_width)
            inputs = self._pipeline.receive_hidden(
                torch.empty(shape, dtype=torch_dtype(self._model.hidden_dtype))
            )
        metadata = self._kv_cache.attention_metadata(self._batch, plan)
        return inputs, self._array(plan.positions_T), self._kv_cache.layers, metadata

    def _array(self, array: Int32Array) -> AnyArray:
        """Return an array in the form that the model accepts. Only native programs accept numpy arrays."""
        return array if isinstance(self._model, NativeDecoder) else as_tensor(array)


def _decoded_rows(
    decoding: NativeDecoding,
    slots_S: Int64Array,
    begins_S: Int32Array,
    result: ModelRunnerOutput,
) -> ComputedRows:
    """Return the accepted rows of a step, starting with the last token of each slot."""
    counts_S = np.ones_like(begins_S)
    rows_S = np.arange(len(slots_S))
    if result.num_sampled:
        counts_S = int32_view(result.num_sampled)
        ends_S = np.cumsum(1 + int32_view(result.num_verified))
        rows_S = ends_S - 1 - int32_view(result.num_verified)
    hidden_KE = decoding.hidden_KE
    hidden_TE = None if hidden_KE is None else torch.from_numpy(hidden_KE)
    return ComputedRows(slots_S, begins_S, counts_S, rows_S, hidden_TE)
