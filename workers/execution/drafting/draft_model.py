"""A small model that proposes drafts for the requests of a larger one.

The draft model's keys and values are in separate tensors, under the block numbers of the model's full-attention
group. Block tables, prefix cache, preemption and the handoff to another core therefore serve both models. If the draft
model did not run when a block was filled, it computes the missing keys and values before it proposes.

A draft is sampled from the draft model's logits with the request's sampling parameters and the random number of its
position. The model later samples its own token with the same parameters and number, so the two are often equal.

Shapes: S slots of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import torch

from ....protocol.arrays import BoolArray, Int32Array, Int64Array, int32_view
from ....protocol.config import CPUBackend, EngineConfig, ModelImpl, ParallelConfig
from ....protocol.errors import ConfigError
from ....protocol.kv_cache_groups import AttentionKind
from ....protocol.worker_messages import NewRequestData, SchedulerOutput
from ...batch import PersistentBatch, StepPlan, even_requests, plan_chunks
from ...cpu.decoder import NativeDecoder
from ...cpu.decoding import NativeDecoding
from ...cpu.drafts import Drafts
from ...device.accelerator import Accelerator
from ...device.device import count_threads
from ...device.dtypes import HostDevice
from ...device.transfers import to_device
from ...loaders import open_checkpoint
from ...models.torch_decoder import TorchDecoder
from ..device_forward import DeviceForward
from ..kv_cache import KVCache
from ..model_loader import Model, load_model
from ..parallel_state import ParallelState
from ..pipeline import Pipeline
from .computed import ComputedRows

_PADDING_TOKENS: Final = 1024
"""Maximum difference between the vocabulary sizes of model and draft model, which comes from padding the matrices."""

_MAX_GRAPH_SIZE: Final = 64
"""Maximum number of tokens of a step on a device that runs from a graph. With more requests, drafts seldom pay."""


class DraftModel:
    """The draft model of a worker. With tensor parallelism, each rank has the whole draft model.

    With an accelerator, it runs in torch on the device of the model, else natively.

    Raises:
        CheckpointError: The draft model is not supported, or its files are damaged.
        ConfigError: The draft model does not fit the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        target_cache: KVCache,
        device: torch.device | HostDevice,
        on_progress: Callable[[int, int], None],
        accelerator: Accelerator | None = None,
    ) -> None:
        speculative = config.scheduler.speculative
        assert speculative is not None and speculative.model is not None
        self._name = speculative.model
        num_threads = torch.get_num_threads()
        backend = CPUBackend.AUTO if accelerator is None else CPUBackend.TORCH
        self._config = _draft_config(config, speculative.model, backend)
        model = load_model(
            self._config,
            device,
            open_checkpoint(speculative.model),
            on_progress,
            ParallelState(),
            has_one_group=True,
        )
        if accelerator is None and not isinstance(model, NativeDecoder):
            raise self._refusal("the native CPU program does not support it")
        if not isinstance(target, NativeDecoder):
            # Loading a native program limits torch to one thread. If the model itself ran in torch, it would be slow.
            torch.set_num_threads(num_threads)
        self._vocab_size = model.spec.num_token_ids
        difference = abs(self._vocab_size - target.spec.num_token_ids)
        if difference > _PADDING_TOKENS:
            raise self._refusal(
                f"its vocabulary has {self._vocab_size} tokens, but the model's has "
                f"{target.spec.num_token_ids}"
            )
        self._target_vocab_size = target.spec.num_token_ids
        self._model: Model = model
        self._accelerator = accelerator
        # The blocks of the model keep every token, so layers with windows need no group of their own.
        if model.spec.recurrent_by_group != (None,):
            raise self._refusal("it has layers other than attention, or with different heads")
        self._cache = KVCache(model, config.model.max_model_len, device)
        self._target_cache = target_cache
        kinds = [group.kind for group in target_cache.groups]
        if AttentionKind.FULL not in kinds:
            raise ConfigError(
                "--speculative-config with a draft model needs a model with full attention; remove the flag"
            )
        self._group = kinds.index(AttentionKind.FULL)
        self._block_size = config.cache.block_size
        self._budget = config.scheduler.max_num_batched_tokens
        self._is_full: BoolArray = np.zeros(0, np.bool_)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"--speculative-config: {self._name!r} cannot be the draft model: {reason}; use another one"
        )

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes, over all layers of the draft model."""
        return self._cache.block_bytes

    def use_batch(self, batch: PersistentBatch, num_blocks: int) -> None:
        """Allocate the keys and values, and prepare for the requests of `batch`."""
        self._cache.allocate(num_blocks)
        self._target = batch
        self._batch = batch.with_own_lengths(self._group)
        self._sampler = self._model.make_sampler(self._batch)
        self._decoding: NativeDecoding | None = None
        self._forward: DeviceForward | None = None
        if isinstance(self._model, NativeDecoder):
            self._decoding = self._model.decoding(self._batch, self._cache.layers)
        else:
            self._forward = self._make_forward(self._model)
        # True for blocks in which the draft model has computed every token. The null block never counts.
        self._is_full = np.zeros(num_blocks, np.bool_)
        self._num_computed: Int64Array = np.zeros(batch.num_slots, np.int64)
        self._num_full: Int64Array = np.zeros(batch.num_slots, np.int64)

    def _make_forward(self, model: Model) -> DeviceForward:
        assert isinstance(model, TorchDecoder) and self._accelerator is not None
        device = self._config.device
        return DeviceForward(
            model,
            self._batch,
            self._cache,
            Pipeline(),
            self._budget,
            None if device.enforce_eager else self._accelerator.graph_recorder(),
            min(_MAX_GRAPH_SIZE, device.max_cudagraph_capture_size),
        )

    def apply_output(self, output: SchedulerOutput) -> None:
        """Apply the changes of slots and blocks in a step, after the batch has applied them."""
        if output.removed_slots:
            for slot in int32_view(output.removed_slots).tolist():
                self._sampler.remove_request(slot)
        if output.block_updates:
            updates = int32_view(output.block_updates).reshape(-1, 4)
            self._is_full[updates[updates[:, 0] == self._group, 3]] = False
        if output.host_copies_in:
            self._is_full[int32_view(output.host_copies_in).reshape(-1, 2)[:, 1]] = False
        for new in output.new_requests:
            if new.pooling_params is None:
                self._add_request(new)

    def _add_request(self, new: NewRequestData) -> None:
        slot, blocks = new.slot, int32_view(new.block_ids[self._group])
        num_known = new.num_computed_tokens // self._block_size
        self._is_full[blocks[num_known:]] = False
        missing = (~self._is_full[blocks[:num_known]]).nonzero()[0]
        self._num_full[slot] = missing[0] if len(missing) else num_known
        self._num_computed[slot] = self._num_full[slot] * self._block_size
        params = msgspec.structs.replace(new.sampling_params, logprobs=None, prompt_logprobs=None)
        prompt, generated = np.split(int32_view(new.token_ids), [new.num_prompt_tokens])
        self._sampler.add_request(slot, params, prompt, new.eos_token_ids, generated)

    def release_requests(self) -> None:
        """Free every slot."""
        for slot in range(self._batch.num_slots):
            self._sampler.remove_request(slot)

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Write drafts for the slots that may have drafts. Return the number of passes through the draft model.

        Unless `samples` is true, only compute the tokens that the model has computed. A pass computes at most as many
        tokens as a step of the model. Requests with more missing tokens get no drafts yet.
        """
        slots_S: Int64Array = computed.slots_S.astype(np.int64)
        self._drop_rejected(slots_S)
        lengths_S = self._target.num_tokens[slots_S].astype(np.int64)
        room_S = self._target.max_model_len - 1 - lengths_S
        limits_S = np.minimum(drafts.limits[slots_S, 0], room_S)
        limits_S = self._target_cache.limit_proposals(limits_S, lengths_S, num_unwritten=1)
        limits_S[drafts.num_drafts(slots_S) > 0] = 0
        wants_S = limits_S > 0
        slots_S, limits_S, ends_S = slots_S[wants_S], limits_S[wants_S], lengths_S[wants_S]
        if not samples:
            ends_S = np.minimum(self._target.num_computed_tokens[slots_S], ends_S - 1)
        is_known_S = ends_S > self._num_computed[slots_S]
        slots_S, limits_S, ends_S = slots_S[is_known_S], limits_S[is_known_S], ends_S[is_known_S]
        if not len(slots_S):
            return 0
        is_next_S = ends_S == self._num_computed[slots_S] + 1
        num_passes = 0
        starts_S = self._target.num_tokens[slots_S]
        self._batch.num_tokens[slots_S] = starts_S
        if not (samples and is_next_S.all()):
            is_ready_S = self._catch_up(slots_S, ends_S, samples)
            num_passes = 1
            slots_S, limits_S = slots_S[is_ready_S], limits_S[is_ready_S]
            starts_S = starts_S[is_ready_S]
        while len(slots_S) and (going := limits_S > num_passes).any():
            if not self._are_known(slots_S[going]):
                break
            self._decode(slots_S[going].astype(np.int32))
            num_passes += 1
        if not samples or not len(slots_S):
            return num_passes
        # The keys and values of the last draft have not been computed.
        counts_S = self._batch.num_tokens[slots_S] - starts_S
        self._num_computed[slots_S] = starts_S + counts_S - 1
        drafts.add_found(slots_S, self._cut_unknown(slots_S, starts_S, counts_S))
        return num_passes

    def _drop_rejected(self, slots_S: Int64Array) -> None:
        """Subtract rejected drafts from the computed tokens of slots, and mark the blocks that are now complete."""
        known_S = np.minimum(self._num_computed[slots_S], self._target.num_tokens[slots_S] - 1)
        self._num_computed[slots_S] = known_S
        num_full_S = known_S // self._block_size
        for slot in slots_S[num_full_S > self._num_full[slots_S]].tolist():
            end = self._num_computed[slot] // self._block_size
            blocks = self._batch.block_tables[0][slot, self._num_full[slot] : end]
            self._is_full[blocks] = True
            self._is_full[0] = False
            self._num_full[slot] = end

    def _catch_up(self, slots_S: Int64Array, ends_S: Int64Array, samples: bool) -> BoolArray:
        """Compute the missing tokens of slots, and the first draft after them. Return which slots got a draft."""
        begins_S = self._num_computed[slots_S]
        missing_S = ends_S - begins_S
        before_S = np.cumsum(missing_S) - missing_S
        granted_S = np.clip(self._budget - before_S, 0, missing_S)
        is_ready_S: BoolArray = (granted_S == missing_S) & samples
        is_run_S = granted_S > 0
        plan = plan_chunks(slots_S[is_run_S], begins_S[is_run_S], granted_S[is_run_S])
        plan.sampling_rows = np.flatnonzero(is_ready_S[is_run_S]).astype(np.int32)
        self._run(plan)
        self._num_computed[slots_S] = begins_S + granted_S
        return is_ready_S

    def _decode(self, slots: Int32Array) -> None:
        """Compute the last token of each slot, and append a draft."""
        if self._decoding is not None:
            self._decoding.step(self._sampler.describe(slots))
        else:
            self._run(plan_chunks(slots, self._batch.num_tokens[slots] - 1, np.ones_like(slots)))

    def _run(self, plan: StepPlan) -> None:
        """Compute the tokens of a plan, and append a draft to each of its sampling rows."""
        rows, slots = plan.logit_rows, plan.slots_S[plan.sampling_rows]
        if self._forward is not None:
            hidden_TD = self._forward(plan).hidden_TD
            if len(rows):
                logits_RV = self._model.compute_logits(
                    hidden_TD[to_device(rows, self._batch.device)]
                )
                sampled = self._sampler.sample(logits_RV, slots, self._batch.num_tokens[slots])
                self._batch.append_tokens(slots, sampled.token_ids)
            return
        assert isinstance(self._model, NativeDecoder)
        inputs = np.minimum(self._batch.input_ids(plan), np.int32(self._vocab_size - 1))
        metadata = self._cache.attention_metadata(self._batch, plan)
        step = inputs, plan.positions_T, self._cache.layers, metadata
        if len(rows):
            sampled = self._model.forward_and_sample(*step, rows, slots)
            self._batch.append_tokens(slots, sampled.token_ids)
        else:
            self._model.forward(*step)

    def _are_known(self, slots_S: Int64Array) -> bool:
        """Return whether the draft model's vocabulary contains the last token of every slot."""
        columns = self._batch.num_tokens[slots_S] - 1
        last = self._batch.host_token_ids_NL[slots_S, columns]
        return bool((last < self._vocab_size).all())

    def _cut_unknown(
        self, slots_S: Int64Array, starts_S: Int32Array, counts_S: Int32Array
    ) -> Int32Array:
        """Return the number of drafts of each slot before the first one that is not in the model's vocabulary."""
        if self._vocab_size <= self._target_vocab_size:
            return counts_S
        tokens = self._batch.host_token_ids_NL
        kept = counts_S.copy()
        for row, (slot, start, count) in enumerate(zip(slots_S, starts_S, counts_S, strict=True)):
            unknown = (tokens[slot, start : start + count] >= self._target_vocab_size).nonzero()[0]
            kept[row] = unknown[0] if len(unknown) else count
        return kept

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the draft model on the null block, for `num_tokens` tokens and for one, to compile kernels and graphs."""
        if self._forward is not None:
            for capture in (each for kind in self._forward.captures() for each in kind):
                capture()
        for count in (num_tokens, 1):
            plan = even_requests(count, -(-count // self._batch.max_model_len))
            plan.sampling_rows = plan.sampling_rows[:0]
            self._run(plan)


def _draft_config(config: EngineConfig, path: str, backend: CPUBackend) -> EngineConfig:
    """Return the model configuration with which a worker loads the draft model."""
    model = msgspec.structs.replace(
        config.model,
        path=path,
        hf_overrides={},
        enable_lora=False,
        loras=(),
        enable_prompt_embeds=False,
        images=None,
        videos=None,
        span_kind=None,
        mmproj="",
        model_impl=ModelImpl.AUTO,
    )
    return msgspec.structs.replace(
        config,
        model=model,
        scheduler=msgspec.structs.replace(config.scheduler, hidden_states=None),
        parallel=ParallelConfig(),
        device=msgspec.structs.replace(
            config.device, cpu_backend=backend, threads=count_threads(config)
        ),
    )
