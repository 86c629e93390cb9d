"""Execute steps on a GPU, which queues a step before the tokens of the previous one have arrived on the host.

With drafts, it waits for the tokens of each step, because they are needed to find and to verify drafts.

Shapes: R sampled rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from ...protocol.arrays import int32_view
from ...protocol.config import EngineConfig, SpeculativeConfig
from ...protocol.sampling_params import SamplingParams
from ...protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from ..batch import StepPlan, even_requests, mixed_requests
from ..cpu.drafts import Drafts
from ..device.accelerator import Accelerator
from ..device.cpu_offload import staging_bytes
from ..device.memory_profile import MemoryProfile, profile_memory
from ..device.transfers import DownloadedOutput, to_device
from ..models.torch_decoder import TorchDecoder
from ..sampling import Grammar, SamplerOutput
from ..sampling.masks import pack_bitmask
from .denoising.denoiser import Denoiser
from .device_forward import DeviceForward
from .drafting.drafting import Drafting
from .kv_cache import KVCache
from .pipeline import Pipeline
from .request_states import RequestStates, has_chunks
from .runner import GrammarSource, StepResult

if TYPE_CHECKING:
    from .drafting.draft_head import DraftHead
    from .drafting.draft_model import DraftModel

logger = logging.getLogger(__name__)


class DeviceExecution:
    """Queues each step on the device, and the copies that bring its tokens to the host."""

    def __init__(
        self,
        config: EngineConfig,
        model: TorchDecoder,
        requests: RequestStates,
        kv_cache: KVCache,
        pipeline: Pipeline,
        accelerator: Accelerator,
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
        self._accelerator = accelerator
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._max_logprobs = config.frontend.max_logprobs
        self._has_cpu_offload = bool(config.cache.host_gib)
        self._speculative = speculative
        self._draft_model = draft_model
        self._denoising = denoising
        self._drafting: Drafting | None = None
        self._forward = DeviceForward(
            model,
            self._batch,
            kv_cache,
            pipeline,
            self._max_tokens,
            # Cross attention reads numbers of the step on the host, which a captured graph would repeat.
            None
            if config.device.enforce_eager or model.spec.source is not None
            else accelerator.graph_recorder(),
            config.device.max_cudagraph_capture_size,
        )

    @torch.inference_mode()
    def profile_memory(self, utilization: float) -> MemoryProfile:
        """Return the peak memory of the largest steps and of a few graphs, measured with a KV cache of one block."""
        self._kv_cache.allocate(1)
        if self._draft_model is not None:
            self._draft_model.use_batch(self._batch, 1)
        profile = profile_memory(
            self._accelerator,
            utilization,
            self._run_largest_steps,
            self._forward.captures(),
            staging_bytes(self._kv_cache.block_bytes) if self._has_cpu_offload else 0,
        )
        self._kv_cache.free()
        self._forward.drop_graphs()
        self._accelerator.release_memory()
        return profile

    def use_kv_cache(self) -> None:
        """Drop the graphs, because they refer to the previous KV cache."""
        self._forward.drop_graphs()
        self._drafting = None
        if self._speculative is not None:
            if self._draft_model is not None:
                self._draft_model.use_batch(self._batch, self._kv_cache.num_blocks)
            self._drafting = Drafting(
                Drafts(self._speculative, self._batch),
                self._model,
                self._requests,
                self._kv_cache,
                self._draft_model,
            )

    def release_slots(self, output: SchedulerOutput) -> None:
        """Save what drafting needs from requests that leave their slots. Called before a step's changes are applied."""
        if self._drafting is not None:
            self._drafting.release_slots(output)

    def release_requests(self) -> None:
        """Free every slot."""
        if self._draft_model is not None:
            self._draft_model.release_requests()

    def close(self) -> None:
        """Drop the graphs."""
        # NCCL cannot close a connection while a graph with one of its operations exists.
        self._forward.drop_graphs()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs and compile every kernel that runs without a graph."""
        began = time.monotonic()
        captures = [capture for kind in self._forward.captures() for capture in kind]
        for capture in captures:
            capture()
        # Different kernels run for different numbers of tokens, for one token per request, and for sequences whose keys
        # are split.
        for count in (1 << n for n in range(self._max_step_tokens.bit_length())):
            self._run(even_requests(count, min(count, self._batch.num_slots)))
        self._run(even_requests(1, 1, num_computed=max(0, self._batch.max_model_len - 2)))
        self._run_largest_steps()
        self._accelerator.release_memory()
        if captures:
            logger.info("captured %d graphs in %.1f s", len(captures), time.monotonic() - began)

    def _run_largest_steps(self) -> None:
        """Run steps with the maximum number of tokens and requests, sampling in the way that takes the most memory.

        One step divides the tokens evenly. The other combines a prompt with a sequence of maximum length, which
        attention splits into the most parts.
        """
        if self._requests.encoders is not None:
            self._requests.encoders.warm_up()
        num_requests = min(self._batch.num_slots, self._max_step_tokens)
        self._run(even_requests(self._max_step_tokens, num_requests))
        self._run(mixed_requests(self._max_step_tokens, num_requests, self._batch.max_model_len))
        if self._draft_model is not None:
            most = self._batch.num_slots * (self._batch.max_model_len - 1)
            self._draft_model.warm_up(min(self._max_tokens, most))

    @property
    def _max_step_tokens(self) -> int:
        """Return the maximum number of tokens of a step. No request has more tokens than its slot can hold."""
        return min(self._max_tokens, self._batch.num_slots * self._batch.max_model_len)

    def _run(self, plan: StepPlan) -> None:
        forwarded = self._forward(plan)
        hidden_TD = forwarded.hidden_TD
        if not self._shard.is_last:
            self._pipeline.send_hidden(hidden_TD.clone())
            return
        if not self._model.spec.has_head:
            return
        sampler = self._requests.sampler
        no_tokens = np.zeros(0, np.int32)
        params = SamplingParams(
            temperature=1.0,
            top_p=0.5,
            seed=0,
            logit_bias={0: 0.0},
            logprobs=self._max_logprobs,
            allowed_token_ids=(0,),
        )
        for slot in plan.slots_S.tolist():
            sampler.add_request(slot, params, no_tokens, ())
        logits_RV = self._model.compute_logits(
            hidden_TD.index_select(0, forwarded.step.logit_rows_R)
        )
        # Leave one row without limits, so that the limited rows are copied, which takes more memory.
        slots_G = plan.slots_S[1:]
        bitmask_NK = np.tile(pack_bitmask([0], logits_RV.shape[1]), (len(slots_G), 1))
        grammar = Grammar(slots_G, np.arange(len(slots_G)), bitmask_NK)
        sampled = sampler.sample(
            logits_RV, plan.slots_S, plan.seq_lens_S, grammar if len(slots_G) else None
        )
        self._forward.append_tokens(forwarded.step, sampled.token_ids)
        for slot in plan.slots_S.tolist():
            sampler.remove_request(slot)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Queue a step on the device. Return its output, which may be pending."""
        if self._denoising is not None:
            plan = self._batch.plan(output)
            if not len(plan.slots_S):
                return ModelRunnerOutput(output.step)
            self._denoising.begin(output, plan)
            return self._denoising.finish(output, plan, self._forward(plan).hidden_TD)
        if self._drafting is None:
            return self._queue(output, self._batch.plan(output), await_grammar)
        await_grammar = partial(self._drafting.await_grammar, await_grammar)
        run = partial(self._run_with_drafts, self._drafting, output, await_grammar)
        return self._drafting.execute(output, run)

    def _run_with_drafts(
        self, drafting: Drafting, output: SchedulerOutput, await_grammar: GrammarSource
    ) -> ModelRunnerOutput:
        """Run a step, wait for its tokens, and propose the next drafts."""
        if output.drafts and not has_chunks(output):
            slots_S = self._requests.decoding_slots(output)
            if slots_S is not None:
                plan = drafting.plan(output, slots_S)
                hidden_TD = self._forward(plan).hidden_TD
                return drafting.verify(output, plan, hidden_TD, await_grammar)
        plan = self._batch.plan(output)
        pending = self._queue(output, plan, await_grammar)
        if isinstance(pending, ModelRunnerOutput):
            return pending
        result = pending.output()
        slots_R = plan.slots_S[plan.sampling_rows]
        samples_R = ~self._requests.pooling.find(slots_R)
        slots_R, tokens_R = slots_R[samples_R], int32_view(result.sampled_token_ids)[samples_R]
        self._batch.store_tokens(slots_R, self._batch.num_tokens[slots_R] - 1, tokens_R)
        if output.drafts:
            result.num_verified = bytes(len(result.sampled_token_ids))
        result.drafts = drafting.follow(output, plan, slots_R)
        return result

    def _queue(
        self, output: SchedulerOutput, plan: StepPlan, await_grammar: GrammarSource
    ) -> StepResult:
        """Queue a step without drafts on the device. Return its output, which may be pending."""
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        slots_R = plan.slots_S[plan.sampling_rows]
        self._requests.await_tokens(plan.slots_S)
        encoders = self._requests.encoders
        forwarded = self._forward(plan, None if encoders is None else encoders.place(plan))
        hidden_TD = forwarded.hidden_TD
        if not self._shard.is_last:
            # Send a copy, because the next step may overwrite the hidden states first.
            self._pipeline.send_hidden(hidden_TD.clone())
            self._requests.expect_tokens(slots_R)
            return ModelRunnerOutput(output.step)
        self._requests.prompt_logprobs.collect(plan, hidden_TD, self._batch)
        pooled = self._requests.pooling.collect(plan, hidden_TD)
        states = self._requests.hidden_states.collect(plan, hidden_TD)
        step = forwarded.step
        if self._requests.pooling.is_pending:
            samples_R = ~self._requests.pooling.find(slots_R)
            slots_R, rows_R = (
                slots_R[samples_R],
                to_device(plan.logit_rows[samples_R], self._batch.device),
            )
            step = replace(step, logit_rows_R=rows_R)
        make_output = partial(ModelRunnerOutput, output.step)
        sampled = None
        if len(slots_R):
            metadata = self._requests.sampler.describe(slots_R)
            is_greedy = metadata.takes_most_likely and not output.grammar_slots
            if forwarded.greedy_R is not None and is_greedy and step is forwarded.step:
                sampled = SamplerOutput(forwarded.greedy_R.clone(), metadata)
            else:
                logits_RV = forwarded.logits_RV if step is forwarded.step else None
                if logits_RV is None:
                    hidden_RD = hidden_TD.index_select(0, step.logit_rows_R)
                    logits_RV = self._model.compute_logits(hidden_RD)
                sampled = self._requests.sample(output, logits_RV, slots_R, await_grammar)
                self._forward.append_tokens(step, sampled.token_ids)
            self._batch.reserve_columns(slots_R)
            if not self._shard.is_first:
                self._pipeline.send_tokens(sampled.token_ids)
            prompt_logprobs = self._requests.prompt_logprobs.finish(slots_R.tolist())
            make_output = partial(sampled.message, output.step, prompt_logprobs)
        # The output of a step that samples nothing also becomes ready only when the device has finished the step.
        with self._accelerator.download() as download:
            if sampled is not None:
                sampled.fetch(download)
            if pooled is not None:
                pooled.fetch(download)
            if states is not None:
                states.fetch(download)

        def finish() -> ModelRunnerOutput:
            result = make_output()
            if pooled is not None:
                pooled.add_to(result)
            if states is not None:
                states.add_to(result)
            return result

        return DownloadedOutput(output.step, download, finish)
