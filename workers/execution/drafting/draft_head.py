"""A head that proposes drafts from the model's hidden states: a layer of EAGLE or of multi-token prediction.

At each position, the head reads the hidden state of the token there and the embedding of the next token. It runs for
every token that the model computes, because hidden states are not kept. The head's keys and values are stored next to
those in the model's full-attention blocks. The prefix cache, preemption and the handoff to another core therefore cover
both.

The head's keys and values for the last token of a block depend on the first token of the next block, which may differ
between requests that share the block. Blocks loaded by a connector may also lack the head's keys and values. In both
cases drafts are more likely to be rejected, and nothing else changes.

Shapes: S slots of a step, T tokens, D hidden size, E elements of a token's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from ....protocol.arrays import Int32Array, Int64Array, offsets_in_runs
from ....protocol.config import EngineConfig
from ....protocol.errors import ConfigError
from ....protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ....protocol.worker_messages import SchedulerOutput
from ...attention import AttentionSpec, DeviceAttention, PagedAttention, attention_backend
from ...batch import PersistentBatch, SlotArray, StepPlan, even_requests, plan_chunks
from ...cpu.attention import NativeAttention
from ...cpu.decoder import NativeDecoder
from ...cpu.drafts import Drafts
from ...cpu.library import NotSupportedNatively
from ...device.device import count_threads
from ...device.dtypes import AnyArray, HostDtype, as_tensor, on_host, torch_device
from ...device.transfers import to_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...layers.window import Window
from ...loaders import Checkpoint
from ...models.decoder import Decoder
from ...models.kv_cache_groups import group_as_one
from ..kv_cache import KVCache
from ..torch_loader import layer_kernels
from .computed import ComputedRows
from .fusion import Fusion, read_token_ids
from .head_target import HeadTarget
from .layouts.head_layout import HeadLayout
from .tensors import HeadTensors


class HeadSource(NamedTuple):
    """The checkpoint and the model that a head is made from.

    Attributes:
        config: The configuration of the engine.
        target: The model.
        target_cache: Its KV cache.
        checkpoint: The checkpoint that contains the head.
        layout: The layout of the head in the checkpoint.
        embed: Returns the model's embeddings of tokens, float32.
        dtype: The dtype of float weights.
        on_progress: Called with (loaded bytes, total bytes).
        in_torch: If true, the head runs in torch on the device of the model, else natively.
    """

    config: EngineConfig
    target: HeadTarget
    target_cache: KVCache
    checkpoint: Checkpoint
    layout: HeadLayout
    embed: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    on_progress: Callable[[int, int], None]
    in_torch: bool


class DraftHead:
    """The drafting head of a worker. With tensor parallelism, each rank has the whole head.

    Raises:
        CheckpointError: The head's files are damaged.
        ConfigError: The head does not fit the model.
    """

    def __init__(self, source: HeadSource) -> None:
        config, target, target_cache, checkpoint, layout, embed, dtype, on_progress, in_torch = (
            source
        )
        speculative = config.scheduler.speculative
        assert speculative is not None
        self._name, self._num_drafts = method_name(config), speculative.num_speculative_tokens
        self._target, self._layout, self._dtype = target, layout, dtype
        self._target_cache = target_cache
        self._in_torch = in_torch
        self._device = torch_device(target.attention.device) if in_torch else torch.device("cpu")
        self._num_threads = 0 if in_torch else count_threads(config)
        spec, shard, attention = self._arrange(config)
        tensors = HeadTensors(
            checkpoint, layout.tensor_names, dtype, self._device, self._num_threads, self._name
        )
        self.fusion = Fusion(layout, tensors, target, embed)
        self._model = self._load(config, spec, shard, attention, tensors, on_progress)
        self._token_ids = read_token_ids(layout, tensors, target.spec.num_token_ids)
        self._make_cache(config)
        self._batch: PersistentBatch

    def _arrange(self, config: EngineConfig) -> tuple[ModelSpec, ModelShard, PagedAttention]:
        """Return the spec of the head's layers with their KV-cache groups, this rank's part of it, and its attention.

        Raises:
            ConfigError: The model or the head needs other groups than full attention.
        """
        max_model_len = config.model.max_model_len
        followed = _group_to_follow(self._target_cache.groups)
        if followed is None or self._target.spec.num_positions:
            raise ConfigError(
                f"{self._name} needs a model with full or sliding attention and without learned position "
                "embeddings; use another method"
            )
        self._group, window = followed
        spec = group_as_one(self._layout.spec, max_model_len)
        if spec is not None and window is not None:
            # The model's blocks are freed when its window has passed them.
            spec = replace(
                spec,
                layers=tuple(
                    replace(layer, window=_narrower(layer.window, window)) for layer in spec.layers
                ),
            )
        if spec is None:
            raise ConfigError(
                f"{self._name}: the head has layers without attention, or with different numbers of heads; use "
                "another method"
            )
        shard = ModelShard.whole(spec)
        dtype = self._target.attention.dtype
        if self._in_torch and isinstance(dtype, HostDtype):
            # The caches of a native program may have dtypes that torch's attention does not read.
            dtype = self._dtype
        attention = AttentionSpec.from_model(
            spec,
            shard,
            block_size=config.cache.block_size,
            dtype=dtype,
            device=self._device,
        )
        if self._in_torch:
            return spec, shard, attention_backend(attention)
        try:
            return spec, shard, NativeAttention(attention)
        except NotSupportedNatively as error:
            raise self._refusal(error) from error

    def _load(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        shard: ModelShard,
        attention: PagedAttention,
        tensors: HeadTensors,
        on_progress: Callable[[int, int], None],
    ) -> NativeDecoder | Decoder:
        max_model_len, kept_layers = config.model.max_model_len, (len(spec.layers),)
        if self._in_torch:
            assert isinstance(attention, DeviceAttention)
            return Decoder(
                spec,
                tensors.checkpoint,
                attention,
                dtype=self._dtype,
                device=self._device,
                max_model_len=max_model_len,
                shard=shard,
                kernels=layer_kernels(self._dtype, self._device, config.device.batch_invariant),
                on_progress=on_progress,
                kept_layers=kept_layers,
            )
        assert isinstance(attention, NativeAttention)
        try:
            return NativeDecoder(
                spec,
                tensors.checkpoint,
                attention,
                dtype=self._dtype,
                max_model_len=max_model_len,
                shard=shard,
                on_progress=on_progress,
                quantization=config.model.quantization,
                num_threads=self._num_threads,
                kept_layers=kept_layers,
                stores_keys=self._layout.block_size > 0,
            )
        except NotSupportedNatively as error:
            raise self._refusal(error) from error

    def _refusal(self, error: NotSupportedNatively) -> ConfigError:
        return ConfigError(f"{self._name}: {error}; use another method")

    def _make_cache(self, config: EngineConfig) -> None:
        self._cache = KVCache(self._model, config.model.max_model_len, self._device)
        self._target_cache.add_follower(self._cache)

    @property
    def block_bytes(self) -> int:
        """Bytes per block in addition to the model's KV cache: 0, because that includes the head's."""
        return 0

    def use_batch(self, batch: PersistentBatch, num_blocks: int) -> None:
        """Prepare to draft for the requests of `batch`."""
        self._batch = batch.with_own_lengths(self._group)
        self._num_tokens = batch.num_tokens

    def apply_output(self, output: SchedulerOutput) -> None:
        """Do nothing, because requests have no state in this class."""

    def release_requests(self) -> None:
        """Do nothing, because requests have no state in this class."""

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Run the head for the tokens of a step, and write drafts for the slots that may have drafts.

        Return the number of passes through the head, which is the largest number of drafts in a slot. If `samples` is
        false, nothing was sampled and no drafts are written.
        """
        rows = self._known_rows(computed)
        if not len(rows.slots_S):
            return 0
        assert computed.hidden_TE is not None
        counts_S, begins_S = rows.counts_S, rows.begins_S
        offsets_T = offsets_in_runs(counts_S)
        rows_T = to_device(np.repeat(rows.rows_S, counts_S) + offsets_T, self._device)
        hidden_TD = self.fusion.read_target(computed.hidden_TE[rows_T])
        outputs_TE = self.run(rows.slots_S, begins_S, counts_S, hidden_TD)
        limits_S = self._limits(drafts, rows.slots_S)
        wants_S = limits_S > 0
        if not samples or not wants_S.any():
            return 0
        last_S = to_device((np.cumsum(counts_S) - 1)[wants_S], self._device)
        slots_S, limits_S = rows.slots_S[wants_S], limits_S[wants_S]
        self._draft(slots_S, limits_S, outputs_TE[last_S])
        drafts.add_found(slots_S, limits_S.astype(np.int32))
        return int(limits_S.max())

    def _known_rows(self, computed: ComputedRows) -> _KnownRows:
        """Return the computed tokens whose next token is known, of the slots that have any."""
        slots_S, begins_S = computed.slots_S.astype(np.int64), computed.begins_S.astype(np.int64)
        # If nothing was sampled, the token after the last one is unknown.
        last_S = self._num_tokens[slots_S].astype(np.int64) - 1
        counts_S = np.minimum(computed.counts_S, last_S - begins_S)
        has_rows_S = counts_S > 0
        arrays = (slots_S, begins_S, counts_S, computed.rows_S.astype(np.int64))
        return _KnownRows(*(each[has_rows_S] for each in arrays))

    def _limits(self, drafts: Drafts, slots_S: Int64Array) -> Int32Array:
        """Return how many drafts may be proposed for each slot."""
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        room_S = self._batch.max_model_len - 1 - lengths_S
        limits_S = np.minimum(drafts.limits[slots_S, 0], room_S)
        limits_S = self._target_cache.limit_proposals(limits_S, lengths_S, num_unwritten=2)
        limits_S[drafts.num_drafts(slots_S) > 0] = 0
        return limits_S

    def _draft(self, slots_S: Int64Array, limits_S: Int32Array, outputs_SE: Tensor) -> None:
        """Write `limits_S` drafts after the tokens of each slot.

        The first draft follows from the hidden states `outputs_SE`.
        """
        tokens = self._batch.host_token_ids_NL
        for index in range(int(limits_S.max())):
            if index:
                goes_on_S = limits_S > index
                slots_S, limits_S = slots_S[goes_on_S], limits_S[goes_on_S]
                hidden_SD = self.fusion.read_own(outputs_SE[to_device(goes_on_S, self._device)])
                outputs_SE = self._continue(slots_S, index, hidden_SD)
            positions_S = (self._num_tokens[slots_S] + index).astype(np.int32)
            chosen_S = self.choose(outputs_SE, slots_S.astype(np.int32), positions_S)
            tokens[slots_S, positions_S] = on_host(chosen_S)

    def _continue(self, slots_S: Int64Array, index: int, hidden_SD: Tensor) -> Tensor:
        """Run the head for the last of `index` drafts of each slot, and return its hidden states [S, E]."""
        begins_S = self._num_tokens[slots_S].astype(np.int64) + index - 2
        return self.run(slots_S, begins_S, np.ones_like(slots_S), hidden_SD)

    def choose(self, outputs_SE: Tensor, slots_S: Int32Array, positions_S: Int32Array) -> Tensor:
        """Return the draft tokens [S] at these positions, chosen from the head's hidden states `outputs_SE`."""
        normed_SD = outputs_SE[:, : self._layout.spec.hidden_size]
        if self._token_ids is None:
            return self._target.choose_tokens(normed_SD, slots_S, positions_S)
        logits_SC = as_tensor(self._model.compute_logits(normed_SD))
        return self._target.choose_among(self._token_ids, logits_SC, slots_S, positions_S)

    def run(
        self,
        slots_S: SlotArray,
        begins_S: SlotArray,
        counts_S: SlotArray,
        hidden_TD: Tensor,
        distance: int = 1,
    ) -> Tensor:
        """Run the head at `counts_S` positions per slot, from `begins_S` on. Return its hidden states [T, E].

        At each position it reads the token `distance` positions later.
        """
        plan = plan_chunks(slots_S, begins_S, counts_S)
        places_T = np.minimum(plan.positions_T + distance, self._batch.max_model_len - 1)
        following_T = self._batch.host_token_ids_NL[plan.slots_T, places_T]
        metadata = self._cache.attention_metadata(self._batch, plan)
        return self._run_layers(plan, following_T, hidden_TD, self._cache.layers, metadata)

    def _run_layers(
        self,
        plan: StepPlan,
        following_T: Int32Array,
        hidden_TD: Tensor,
        caches: Sequence[AnyArray],
        metadata: Sequence[Any],
    ) -> Tensor:
        """Run the head's layers for the tokens `following_T`, after those of `plan`. Return hidden states [T, E]."""
        embedded_TD = self.fusion.embed(to_device(following_T, self._device))
        inputs = self.fusion.fuse(embedded_TD, hidden_TD)
        self._model.forward(
            inputs.to(self._dtype) if self._in_torch else inputs,
            to_device(plan.positions_T, self._device),
            caches,
            metadata,
        )
        assert self._model.kept_hidden_TE is not None
        return self._model.kept_hidden_TE

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the head on the null block, for `num_tokens` tokens and for one, to compile kernels."""
        for count in (num_tokens, 1):
            plan = even_requests(count, -(-count // (self._batch.max_model_len - 1)))
            counts_S = np.diff(plan.query_start_loc)
            hidden_TD = self.fusion.no_states(count)
            self.run(plan.slots_S, plan.num_computed_S, counts_S, hidden_TD)


def _group_to_follow(groups: Sequence[KVCacheGroup]) -> tuple[int, int | None] | None:
    """Return the index and the window of the group whose blocks keep the most tokens; None if there is none."""
    kinds = [group.kind for group in groups]
    if AttentionKind.FULL in kinds:
        return kinds.index(AttentionKind.FULL), None
    windows = {
        group.size: index
        for index, group in enumerate(groups)
        if group.kind is AttentionKind.SLIDING_WINDOW
    }
    return (windows[max(windows)], max(windows)) if windows else None


def _narrower(window: Window | None, limit: int) -> Window:
    """Return the window of a layer where blocks keep only `limit` tokens."""
    return min(window, limit) if isinstance(window, int) else limit


class _KnownRows(NamedTuple):
    """The computed tokens whose next token is known: `counts_S` of each slot; see `ComputedRows`."""

    slots_S: Int64Array
    begins_S: Int64Array
    counts_S: Int64Array
    rows_S: Int64Array


def method_name(config: EngineConfig) -> str:
    """Return the name of the configured method in error messages."""
    assert config.scheduler.speculative is not None
    return f"--speculative-config with method {config.scheduler.speculative.method.value!r}"
