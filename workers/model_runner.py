"""Executes steps: model, persistent batch, KV cache and sampler of one worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.config import EngineConfig
from ..protocol.errors import EngineError
from ..protocol.messages import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    RowLogprobs,
    SchedulerOutput,
)
from . import host_memory
from .attention import AttentionBatch
from .batch import PersistentBatch, StepPlan
from .host_cache import HostCache
from .kv_cache_groups import kv_cache_groups
from .loaders import Checkpoint
from .model_loader import Decoding, Model, load_model
from .parallel_state import ParallelState
from .pipeline import TokenFeed
from .prompt_logprobs import PromptLogprobs
from .sampling import Sampler, SamplerOutput, SamplingMetadata

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
    ) -> None:
        self._device = device
        self._block_size = config.cache.block_size
        self._parallel = parallel = parallel or ParallelState()
        self._model = load_model(config, device, checkpoint, on_progress, parallel)
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

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """The n-th layers of all groups share a tensor, for a block belongs to one group."""
        shape = self._attention.kv_cache_shape(num_blocks)
        tensors = [
            _zeros(shape, self._attention.dtype, self._device) for _ in range(self._num_tensors)
        ]
        next_tensor = {group: iter(tensors) for group in self._group_of_layer}
        self._kv_caches = [next(next_tensor[group]) for group in self._group_of_layer]
        if num_host_blocks:
            self._host_cache = HostCache(num_host_blocks, tensors)
        self._decoding = self._model.decoding(self._batch, self._kv_caches)

    def forget_requests(self) -> None:
        """Every slot is free again."""
        self._decoded_rows = None
        self._batch.forget_requests()
        for slot in range(self._batch.num_slots):
            self._sampler.remove(slot)
            self._prompt_logprobs.remove(slot)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode, whose kernels are prepared on first use, into the null block."""
        for num_tokens in (self._block_size, 1):
            tokens = np.zeros(num_tokens, np.int32)
            batch = AttentionBatch(
                query_start_loc=np.array([0, num_tokens], np.int32),
                seq_lens=np.array([num_tokens], np.int32),
                block_table=np.zeros((1, 1), np.int32),
                slot_mapping=np.arange(num_tokens, dtype=np.int32),
            )
            tokens_T = torch.from_numpy(tokens).to(self._device)
            batches = [batch] * len(self._windows_by_group)
            hidden_TD = self._model.forward(*self._stage_inputs(tokens_T, tokens_T, batches))
            if self._shard.is_last:
                self._model.compute_logits(hidden_TD[-1:])
            else:
                self._parallel.pipeline.send_hidden(hidden_TD)

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        """Apply the deltas, run the step and sample. Every output gets one result, also an empty one.

        Only the last of several stages has something to tell; its ranks all sample the same.
        """
        self._copy_blocks(output)
        self._apply(output)
        self._decoded_rows = rows = self._rows_to_decode(output)
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
            sampled = self._sample(output, plan, hidden_TD, await_grammar)
        self._batch.append(slots_R, sampled.token_ids)
        if not self._shard.is_first:
            self._parallel.pipeline.send_tokens(sampled.token_ids)
        return _result(output, sampled, self._prompt_logprobs.finish(slots_R.tolist()))

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
        batch = self._batch
        if self._token_feed is not None:
            self._token_feed.await_tokens(plan.slots_S)
        positions_T = torch.from_numpy(plan.positions_T).to(self._device)
        batches = [
            AttentionBatch(
                query_start_loc=plan.query_start_loc,
                seq_lens=plan.seq_lens_S,
                block_table=block_table[plan.slots_S],
                slot_mapping=batch.slot_mapping(plan, group),
            )
            for group, block_table in enumerate(batch.block_tables)
        ]
        return self._stage_inputs(batch.input_ids(plan), positions_T, batches)

    def _stage_inputs(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, batches: list[AttentionBatch]
    ) -> _Inputs:
        """The first stage begins with the tokens, the others with the hidden states of the stage before."""
        inputs = token_ids_T
        if not self._shard.is_first:
            inputs = self._parallel.pipeline.receive_hidden(
                (len(positions_T), self._spec.hidden_size), self._model.hidden_dtype, self._device
            )
        metadata = [
            self._attention.build(batch, windows)
            for batch, windows in zip(batches, self._windows_by_group, strict=True)
        ]
        return inputs, positions_T, self._kv_caches, metadata

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
        plan: StepPlan,
        hidden_TD: torch.Tensor,
        await_grammar: GrammarSource,
    ) -> SamplerOutput:
        """Sample where the logits themselves are needed."""
        slots_R = plan.slots_S[plan.sampling_rows]
        hidden_RD = hidden_TD[torch.from_numpy(plan.logit_rows).to(self._device)]
        logits_RV = self._model.compute_logits(hidden_RD)
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
