"""Executes steps: model, persistent batch, KV cache and sampler of one worker."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.config import EngineConfig
from ..protocol.errors import EngineError
from ..protocol.messages import (
    GrammarOutput,
    HeldRequest,
    ModelRunnerOutput,
    NewRequestData,
    RowLogprobs,
    SchedulerOutput,
)
from ..protocol.sampling_params import SamplingParams
from . import host_memory
from .accelerator import Accelerator, CUDAAccelerator
from .batch import PersistentBatch, StepPlan, even_requests
from .device_errors import explaining_device_errors
from .device_forward import DeviceForward
from .host_cache import HostCache
from .kv_cache_groups import kv_cache_groups
from .loaders import Checkpoint
from .memory_profile import MemoryProfile, profile_memory
from .model_loader import Decoding, Model, load_model
from .parallel_state import ParallelState
from .pipeline import TokenFeed
from .prompt_logprobs import PromptLogprobs
from .runner import StepResult
from .sampling import Sampler, SamplerOutput, SamplingMetadata
from .transfers import DownloadedOutput

logger = logging.getLogger(__name__)

GrammarSource = Callable[[int], GrammarOutput | None]
_Inputs = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[Any]]


class ModelRunner:
    """Loads the model in its constructor; `allocate_kv_cache` must precede `execute`."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        checkpoint: Checkpoint,
        on_progress: Callable[[int, int], None],
        parallel: ParallelState | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        if device.type == "cuda":
            accelerator = accelerator or CUDAAccelerator(device)
        self._device = device
        self._accelerator = accelerator
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._block_size = config.cache.block_size
        self._parallel = parallel = parallel or ParallelState()
        use_graphs = accelerator is not None and not config.device.enforce_eager
        self._model = load_model(config, device, checkpoint, on_progress, parallel, use_graphs)
        self._spec = self._model.spec
        self._shard = self._model.shard
        self._attention = self._model.attention
        self.kv_cache_groups = kv_cache_groups(self._spec, config.model.max_model_len)
        own_layers = self._spec.layers[self._shard.layers.start : self._shard.layers.stop]
        self._group_of_layer = [layer.kv_cache_group for layer in own_layers]
        self._num_tensors = max(Counter(self._group_of_layer).values())
        self._windows_by_group = [
            frozenset(layer.window for layer in own_layers if layer.kv_cache_group == group)
            for group in range(len(self.kv_cache_groups))
        ]
        self._batch = PersistentBatch(
            config.scheduler.max_num_seqs,
            config.model.max_model_len,
            self._block_size,
            len(self._windows_by_group),
            device,
        )
        self._token_feed: TokenFeed | None = None
        if self._shard.is_first and not self._shard.is_last:
            self._token_feed = TokenFeed(
                parallel.pipeline, self._batch, config.scheduler.max_num_seqs
            )
        self._sampler = Sampler(
            config.scheduler.max_num_seqs,
            self._spec.vocab_size,
            device,
            self._model.choose_tokens,
        )
        self._prompt_logprobs = PromptLogprobs(self._model.compute_logits)
        self._device_forward: DeviceForward | None = None
        if accelerator is not None:
            self._device_forward = DeviceForward(
                self._model,
                self._batch,
                parallel.pipeline,
                self._windows_by_group,
                self._max_tokens,
                accelerator.graph_recorder() if use_graphs else None,
                config.device.max_cudagraph_capture_size,
            )
        self._kv_caches: list[torch.Tensor] = []
        self._host_cache: HostCache | None = None
        self._decoding: Decoding | None = None
        # Of the last step, if `_decoding` did it.
        self._decoded_rows: SamplingMetadata | None = None

    @property
    def model(self) -> Model:
        return self._model

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group that are here."""
        elements = int(np.prod(self._attention.kv_cache_shape(1)))
        return elements * self._attention.dtype.itemsize * self._num_tensors

    @torch.inference_mode()
    def profile_memory(self, utilization: float) -> MemoryProfile | None:
        """Run the largest step and capture some graphs, on a KV cache of one block; None on the CPU."""
        if self._accelerator is None or self._device_forward is None:
            return None
        self._allocate(1)
        profile = profile_memory(
            self._accelerator,
            utilization,
            self._run_largest_step,
            self._device_forward.captures(),
        )
        self._kv_caches = []
        self._device_forward.use([])
        self._accelerator.release_memory()
        return profile

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        tensors = self._allocate(num_blocks)
        if self._device.type == "cpu":
            host_memory.populate(
                [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in tensors]
            )
        if num_host_blocks:
            self._host_cache = HostCache(num_host_blocks, tensors)
        self._decoding = self._model.decoding(self._batch, self._kv_caches)

    def _allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """The n-th layers of all groups share a tensor, for a block belongs to one group."""
        shape = self._attention.kv_cache_shape(num_blocks)
        tensors = [
            _zeros(shape, self._attention.dtype, self._device) for _ in range(self._num_tensors)
        ]
        next_tensor = {group: iter(tensors) for group in self._group_of_layer}
        self._kv_caches = [next(next_tensor[group]) for group in self._group_of_layer]
        if self._device_forward is not None:
            self._device_forward.use(self._kv_caches)
        return tensors

    def _run_largest_step(self) -> None:
        """As many tokens as a step may have, of as many requests, all of which sample in the way that takes most."""
        assert self._device_forward is not None
        num_slots = self._batch.num_slots
        num_tokens = min(self._max_tokens, num_slots * self._batch.max_model_len)
        plan = even_requests(num_tokens, min(num_slots, num_tokens))
        forwarded = self._device_forward(plan)
        hidden_TD = forwarded.hidden_TD
        if not self._shard.is_last:
            self._parallel.pipeline.send_hidden(hidden_TD.clone())
            return
        no_tokens = np.zeros(0, np.int32)
        params = SamplingParams(temperature=1.0, top_p=0.5, seed=0)
        for slot in plan.slots_S.tolist():
            self._sampler.add(slot, params, no_tokens, ())
        logits_RV = self._model.compute_logits(hidden_TD[forwarded.step.logit_rows_R])
        self._sampler.sample(logits_RV, plan.slots_S, plan.seq_lens_S)
        for slot in plan.slots_S.tolist():
            self._sampler.remove(slot)

    def forget_requests(self) -> list[HeldRequest]:
        """Free every slot. Returns what the KV cache holds of the requests that were in them."""
        self._decoded_rows = None
        for slot in range(self._batch.num_slots):
            self._sampler.remove(slot)
            self._prompt_logprobs.remove(slot)
        return self._batch.forget_requests()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode, whose kernels are prepared on first use, into the null block."""
        if self._device_forward is not None:
            self._capture_graphs(self._device_forward)
            return
        for num_tokens in (min(self._block_size, self._batch.max_model_len), 1):
            hidden_TD = self._model.forward(*self._inputs(even_requests(num_tokens, 1)))
            if self._shard.is_last:
                self._model.compute_logits(hidden_TD[-1:])
            else:
                self._parallel.pipeline.send_hidden(hidden_TD)

    def _capture_graphs(self, device_forward: DeviceForward) -> None:
        began = time.monotonic()
        captures = [capture for kind in device_forward.captures() for capture in kind]
        for capture in captures:
            capture()
        self._run_largest_step()
        assert self._accelerator is not None
        self._accelerator.release_memory()
        if captures:
            logger.info("%d graphs captured in %.1f s", len(captures), time.monotonic() - began)

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Apply the deltas, run the step and sample. Every output gets one result, also an empty one.

        Only the last of several stages has something to tell; its ranks all sample the same.
        """
        self._copy_blocks(output)
        self._apply(output)
        self._decoded_rows = rows = self._rows_to_decode(output)
        if self._accelerator is not None and self._device_forward is not None:
            with explaining_device_errors(f"in step {output.step}"):
                return self._execute_on_device(
                    output, await_grammar, self._accelerator, self._device_forward
                )
        if self._decoding is None or rows is None:
            return self._execute(output, await_grammar)
        tokens_S, num_failed = self._decoding.step(rows)
        if num_failed:
            return _result(output, SamplerOutput(torch.from_numpy(tokens_S).long(), rows))
        return ModelRunnerOutput(output.step, tokens_S.tobytes())

    @torch.inference_mode()
    def _execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        plan = self._batch.plan(output)
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        slots_R = plan.slots_S[plan.sampling_rows]
        inputs = self._inputs(plan)
        if not self._shard.is_last:
            self._hand_on(self._model.forward(*inputs), slots_R)
            return ModelRunnerOutput(output.step)
        metadata = self._sampler.describe(slots_R)
        if output.grammar_slots or metadata.needs_logits or not len(slots_R):
            hidden_TD = self._model.forward(*inputs)
            sampled = None
        else:
            hidden_TD, chosen_R = self._model.forward_and_sample(
                *inputs, plan.logit_rows, metadata, self._batch.num_tokens[slots_R]
            )
            sampled = SamplerOutput(chosen_R, metadata)
        self._prompt_logprobs.collect(plan, hidden_TD, self._batch)
        if not len(slots_R):
            return ModelRunnerOutput(output.step)
        if sampled is None:
            logits_RV = self._model.compute_logits(hidden_TD[torch.from_numpy(plan.logit_rows)])
            sampled = self._sample(output, logits_RV, slots_R, await_grammar)
        self._batch.append(slots_R, sampled.token_ids)
        if not self._shard.is_first:
            self._parallel.pipeline.send_tokens(sampled.token_ids)
        return _result(output, sampled, self._prompt_logprobs.finish(slots_R.tolist()))

    @torch.inference_mode()
    def _execute_on_device(
        self,
        output: SchedulerOutput,
        await_grammar: GrammarSource,
        accelerator: Accelerator,
        device_forward: DeviceForward,
    ) -> StepResult:
        """Queue the step, and what brings its tokens to the host."""
        plan = self._batch.plan(output)
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        slots_R = plan.slots_S[plan.sampling_rows]
        if self._token_feed is not None:
            self._token_feed.await_tokens(plan.slots_S)
        forwarded = device_forward(plan)
        hidden_TD = forwarded.hidden_TD
        if not self._shard.is_last:
            # The next step's hidden states may take the place of these before they are sent.
            self._hand_on(hidden_TD.clone(), slots_R)
            return ModelRunnerOutput(output.step)
        self._prompt_logprobs.collect(plan, hidden_TD, self._batch)
        make_output = partial(ModelRunnerOutput, output.step)
        sampled = None
        if len(slots_R):
            metadata = self._sampler.describe(slots_R)
            is_greedy = metadata.is_greedy and not metadata.needs_logits
            if forwarded.greedy_R is not None and is_greedy and not output.grammar_slots:
                sampled = SamplerOutput(forwarded.greedy_R.clone(), metadata)
            else:
                logits_RV = forwarded.logits_RV
                if logits_RV is None:
                    hidden_RD = hidden_TD[forwarded.step.logit_rows_R]
                    logits_RV = self._model.compute_logits(hidden_RD)
                sampled = self._sample(output, logits_RV, slots_R, await_grammar)
                device_forward.append(forwarded.step, sampled.token_ids)
            self._batch.reserve(slots_R)
            if not self._shard.is_first:
                self._parallel.pipeline.send_tokens(sampled.token_ids)
            prompt_logprobs = self._prompt_logprobs.finish(slots_R.tolist())
            make_output = partial(_result, output, sampled, prompt_logprobs)
        # Without tokens, too, a step has its output when the device is done with it.
        with accelerator.download() as download:
            if sampled is not None:
                sampled.fetch(download)
        return DownloadedOutput(output.step, download, make_output)

    def close(self) -> None:
        """Let the other workers of the replica have what they wait for."""
        if self._token_feed is not None:
            self._token_feed.close()
        self._parallel.pipeline.close()

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        if self._host_cache is not None:
            if output.host_copies_out:
                self._host_cache.copy_out(output.host_copies_out)
            if output.host_copies_in:
                self._host_cache.copy_in(output.host_copies_in)

    def _apply(self, output: SchedulerOutput) -> None:
        self._batch.apply(output)
        if self._token_feed is not None:
            for new in output.new_requests:
                self._token_feed.forget(new.slot)
        if not self._shard.is_last:
            return
        if output.removed_slots:
            for slot in int32_view(output.removed_slots).tolist():
                self._sampler.remove(slot)
                self._prompt_logprobs.remove(slot)
        if output.new_requests:
            self._add_to_sampler(output.new_requests)

    @torch.inference_mode()
    def _add_to_sampler(self, new_requests: Sequence[NewRequestData]) -> None:
        for new in new_requests:
            tokens = int32_view(new.token_ids)
            prompt, generated = np.split(tokens, [new.num_prompt_tokens])
            self._sampler.add(new.slot, new.sampling_params, prompt, new.eos_token_ids, generated)
            if new.sampling_params.prompt_logprobs is not None and not len(generated):
                self._prompt_logprobs.add(new.slot, new.sampling_params.prompt_logprobs)

    def _rows_to_decode(self, output: SchedulerOutput) -> SamplingMetadata | None:
        """The rows of a step that is `_decoding`'s: every slot computes its last token, and nobody wants more than the next."""
        if self._decoding is None or output.chunks or output.grammar_slots:
            return None
        rows = self._decoded_rows
        if output.slots is None and rows is not None and rows.is_current:
            return rows
        slots_S = self._batch.decoding_slots(output)
        if slots_S is None or self._prompt_logprobs.is_pending:
            return None
        rows = self._sampler.describe(slots_S)
        return None if rows.needs_logits else rows

    def _inputs(self, plan: StepPlan) -> _Inputs:
        """What the model's `forward` takes."""
        if self._token_feed is not None:
            self._token_feed.await_tokens(plan.slots_S)
        # The first stage begins with the tokens, the others with the hidden states of the stage before.
        if self._shard.is_first:
            inputs = self._batch.input_ids(plan)
        else:
            shape = (len(plan.positions_T), self._spec.hidden_size)
            inputs = self._parallel.pipeline.receive_hidden(
                torch.empty(shape, dtype=self._model.hidden_dtype)
            )
        metadata = [
            self._attention.build(batch, windows)
            for batch, windows in zip(
                self._batch.attention_batches(plan), self._windows_by_group, strict=True
            )
        ]
        return inputs, torch.from_numpy(plan.positions_T), self._kv_caches, metadata

    def _hand_on(self, hidden_TD: torch.Tensor, slots_R: Int32Array) -> None:
        """The last stage samples for `slots_R`; the first needs the tokens, those between only their number."""
        self._parallel.pipeline.send_hidden(hidden_TD)
        if self._token_feed is None:
            self._batch.reserve(slots_R)
        elif len(slots_R):
            self._token_feed.expect(slots_R)

    def _sample(
        self,
        output: SchedulerOutput,
        logits_RV: torch.Tensor,
        slots_R: Int32Array,
        await_grammar: GrammarSource,
    ) -> SamplerOutput:
        """Sample where the logits themselves are needed."""
        grammar = self._grammar(output, await_grammar)
        return self._sampler.sample(logits_RV, slots_R, self._batch.num_tokens[slots_R], grammar)

    @staticmethod
    def _grammar(
        output: SchedulerOutput, await_grammar: GrammarSource
    ) -> tuple[Int32Array, Int32Array] | None:
        """The constrained slots and their bitmasks int32[len, ceil(V / 32)]."""
        if not output.grammar_slots:
            return None
        slots = int32_view(output.grammar_slots)
        message = await_grammar(output.step)
        if message is None:
            return None
        bitmask = int32_view(message.bitmask)
        if len(slots) == 0 or len(bitmask) % len(slots):
            raise EngineError(
                f"step {output.step}: a bitmask of {len(bitmask)} words for {len(slots)} slots"
            )
        return slots, bitmask.reshape(len(slots), -1)


def _result(
    output: SchedulerOutput, sampled: SamplerOutput, prompt_logprobs: Sequence[RowLogprobs] = ()
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        output.step,
        sampled_token_ids=sampled.sampled_token_ids,
        logprobs=sampled.logprobs,
        prompt_logprobs=[*prompt_logprobs],
        nan_slots=sampled.nan_slots,
        failed_slots=sampled.failed_slots,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(host_memory.allocate(num_bytes)).view(dtype).view(shape)
