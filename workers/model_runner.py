"""Executes steps: model, persistent batch, KV cache and sampler of one worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.config import EngineConfig
from ..protocol.errors import EngineError
from ..protocol.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from . import host_memory
from .attention import AttentionBatch
from .batch import PersistentBatch, StepPlan
from .host_cache import HostCache
from .kv_cache_groups import kv_cache_groups
from .loaders import Checkpoint
from .model_loader import load_model
from .prompt_logprobs import PromptLogprobs
from .sampling import Sampler, SamplerOutput

GrammarSource = Callable[[int], GrammarOutput | None]


class ModelRunner:
    """Loads the model in its constructor; `allocate_kv_cache` must precede `execute`."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        checkpoint: Checkpoint,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._device = device
        self._block_size = config.cache.block_size
        self._model = load_model(config, device, checkpoint, on_progress)
        self._spec = self._model.spec
        self._attention = self._model.attention
        self.kv_cache_groups = kv_cache_groups(self._spec, config.model.max_model_len)
        self._layers_by_group = Counter(layer.kv_cache_group for layer in self._spec.layers)
        self._windows_by_group = self._spec.windows_by_group
        self._batch = PersistentBatch(
            config.scheduler.max_num_seqs,
            config.model.max_model_len,
            self._block_size,
            len(self._windows_by_group),
            device,
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

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group."""
        elements = int(np.prod(self._attention.kv_cache_shape(1)))
        return elements * self._attention.dtype.itemsize * max(self._layers_by_group.values())

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """The n-th layers of all groups share a tensor, for a block belongs to one group."""
        shape = self._attention.kv_cache_shape(num_blocks)
        tensors = [
            _zeros(shape, self._attention.dtype, self._device)
            for _ in range(max(self._layers_by_group.values()))
        ]
        next_tensor = {group: iter(tensors) for group in self._layers_by_group}
        self._kv_caches = [next(next_tensor[layer.kv_cache_group]) for layer in self._spec.layers]
        if num_host_blocks:
            self._host_cache = HostCache(num_host_blocks, tensors)

    def forget_requests(self) -> None:
        """Every slot is free again."""
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
            metadata = [self._attention.build(batch, windows) for windows in self._windows_by_group]
            hidden_TD = self._model.forward(
                torch.from_numpy(tokens).to(self._device),
                torch.from_numpy(tokens).to(self._device),
                self._kv_caches,
                metadata,
            )
            self._model.compute_logits(hidden_TD[-1:])

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        """Apply the deltas, run the step and sample. Every output gets one result, also an empty one."""
        self._copy_blocks(output)
        self._apply(output)
        plan = self._batch.plan(output)
        if not len(plan.slots_S):
            return ModelRunnerOutput(output.step)
        slots_R = plan.slots_S[plan.sampling_rows]
        metadata = self._sampler.describe(slots_R)
        if output.grammar_slots or metadata.needs_logits or not len(slots_R):
            hidden_TD = self._model.forward(*self._inputs(plan))
            sampled = None
        else:
            hidden_TD, chosen_R = self._model.forward_and_sample(
                *self._inputs(plan), plan.logit_rows, metadata, self._batch.num_tokens[slots_R]
            )
            sampled = SamplerOutput(chosen_R, metadata)
        self._prompt_logprobs.collect(plan, hidden_TD, self._batch)
        if not len(slots_R):
            return ModelRunnerOutput(output.step)
        if sampled is None:
            sampled = self._sample(output, plan, hidden_TD, await_grammar)
        self._batch.append(slots_R, sampled.token_ids)
        return ModelRunnerOutput(
            output.step,
            sampled_token_ids=sampled.sampled_token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompt_logprobs.finish(slots_R.tolist()),
            nan_slots=sampled.nan_slots,
            failed_slots=sampled.failed_slots,
        )

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        if self._host_cache is not None:
            if output.host_copies_out:
                self._host_cache.copy_out(output.host_copies_out)
            if output.host_copies_in:
                self._host_cache.copy_in(output.host_copies_in)

    def _apply(self, output: SchedulerOutput) -> None:
        for slot in int32_view(output.removed_slots).tolist():
            self._sampler.remove(slot)
            self._prompt_logprobs.remove(slot)
        self._batch.apply(output)
        for new in output.new_requests:
            tokens = int32_view(new.token_ids)
            prompt, generated = np.split(tokens, [new.num_prompt_tokens])
            self._sampler.add(new.slot, new.sampling_params, prompt, new.eos_token_ids, generated)
            if new.sampling_params.prompt_logprobs is not None and not len(generated):
                self._prompt_logprobs.add(new.slot, new.sampling_params.prompt_logprobs)

    def _inputs(
        self, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[Any]]:
        """What the model's `forward` takes."""
        batch = self._batch
        metadata = []
        for group, windows in enumerate(self._windows_by_group):
            metadata.append(
                self._attention.build(
                    AttentionBatch(
                        query_start_loc=plan.query_start_loc,
                        seq_lens=plan.seq_lens_S,
                        block_table=batch.block_tables[group][plan.slots_S],
                        slot_mapping=batch.slot_mapping(plan, group),
                    ),
                    windows,
                )
            )
        positions_T = torch.from_numpy(plan.positions_T).to(self._device)
        slots_T = torch.from_numpy(plan.slots_T).to(self._device)
        input_ids_T = batch.token_ids_NL[slots_T, positions_T]
        return input_ids_T, positions_T, self._kv_caches, metadata

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(host_memory.allocate(num_bytes)).view(dtype).view(shape)
