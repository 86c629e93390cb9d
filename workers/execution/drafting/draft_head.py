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

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import Int32Array, Int64Array
from ....protocol.config import EngineConfig
from ....protocol.errors import ConfigError
from ....protocol.kv_cache_groups import AttentionKind
from ....protocol.worker_messages import SchedulerOutput
from ...attention import AttentionSpec, attention_backend
from ...batch import PersistentBatch, SlotArray, even_requests, plan_chunks
from ...cpu.attention import NativeAttention
from ...cpu.decoder import NativeDecoder
from ...cpu.drafts import Drafts
from ...cpu.library import NotSupportedNatively
from ...device.device import count_threads
from ...device.dtypes import as_tensor, on_host, torch_device
from ...device.transfers import to_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...loaders import Checkpoint, open_checkpoint
from ...models.decoder import Decoder
from ...models.kv_cache_groups import group_layers, kv_cache_groups
from ...models.weights import weight_reader
from ..kv_cache import KVCache
from ..model_loader import Model
from ..torch_loader import layer_kernels
from .computed import ComputedRows
from .fusion import Fusion, read_token_ids
from .head_layouts import HeadLayout, read_layout
from .head_target import HeadTarget, head_target


class DraftHead:
    """The drafting head of a worker. With tensor parallelism, each rank has the whole head.

    With `in_torch`, it runs in torch on the device of the model, else natively.

    Raises:
        CheckpointError: The head is not supported, or its files are damaged.
        ConfigError: The head does not fit the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        target_cache: KVCache,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None],
        *,
        in_torch: bool = False,
    ) -> None:
        speculative = config.scheduler.speculative
        assert speculative is not None
        self._name = f"--speculative-config with method {speculative.method.value!r}"
        target = head_target(model, self._name)
        embed: Callable[[Tensor], Tensor] = target.embed
        if not model.shard.is_first:
            embed = _read_embedding(target.spec, checkpoint, dtype)
        if speculative.model is not None:
            checkpoint = open_checkpoint(speculative.model)
        layout = read_layout(speculative, target.spec, checkpoint)
        kinds = [group.kind for group in target_cache.groups]
        if AttentionKind.FULL not in kinds or target.spec.num_positions:
            raise ConfigError(
                f"{self._name} needs a model with full attention and without learned position embeddings; "
                "use another method"
            )
        self._group = kinds.index(AttentionKind.FULL)
        self._target, self._layout, self._dtype = target, layout, dtype
        self._in_torch = in_torch
        self._device = torch_device(model.attention.device) if in_torch else torch.device("cpu")
        self._num_threads = 0 if in_torch else count_threads(config)
        self._fusion = Fusion(
            layout, checkpoint, target, embed, dtype, self._device, self._num_threads, self._name
        )
        self._model = self._load(config, target, layout, checkpoint, dtype, on_progress)
        self._token_ids = read_token_ids(layout, checkpoint, target.spec.num_token_ids, self._name)
        if self._token_ids is not None:
            self._token_ids = self._token_ids.to(self._device)
        self._cache = KVCache(self._model, config.model.max_model_len, self._device)
        target_cache.add_follower(self._cache)
        self._target_cache = target_cache
        self._batch: PersistentBatch

    def _load(
        self,
        config: EngineConfig,
        target: HeadTarget,
        layout: HeadLayout,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None],
    ) -> NativeDecoder | Decoder:
        spec = group_layers(layout.spec, config.model.max_model_len)
        groups = kv_cache_groups(spec, config.model.max_model_len)
        if [group.kind for group in groups] != [AttentionKind.FULL]:
            raise ConfigError(
                f"{self._name}: the head has layers other than full attention; use another method"
            )
        shard = ModelShard.whole(spec)
        attention = AttentionSpec.from_model(
            spec,
            shard,
            block_size=config.cache.block_size,
            dtype=target.attention.dtype,
            device=self._device,
        )
        if self._in_torch:
            return Decoder(
                spec,
                checkpoint,
                attention_backend(attention),
                dtype=dtype,
                device=self._device,
                max_model_len=config.model.max_model_len,
                shard=shard,
                kernels=layer_kernels(dtype, self._device, config.device.batch_invariant),
                on_progress=on_progress,
                kept_layers=(len(spec.layers),),
            )
        try:
            return NativeDecoder(
                spec,
                checkpoint,
                NativeAttention(attention),
                dtype=dtype,
                max_model_len=config.model.max_model_len,
                shard=shard,
                on_progress=on_progress,
                quantization=config.model.quantization,
                num_threads=self._num_threads,
                kept_layers=(len(spec.layers),),
            )
        except NotSupportedNatively as error:
            raise ConfigError(f"{self._name}: {error}; use another method") from error

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
        slots_S = computed.slots_S.astype(np.int64)
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        begins_S = computed.begins_S.astype(np.int64)
        # If nothing was sampled, the token after the last one is unknown.
        counts_S = np.minimum(computed.counts_S, lengths_S - 1 - begins_S)
        rows_S = computed.rows_S.astype(np.int64)
        has_rows_S = counts_S > 0
        if not has_rows_S.any():
            return 0
        slots_S, lengths_S, begins_S = (
            slots_S[has_rows_S],
            lengths_S[has_rows_S],
            begins_S[has_rows_S],
        )
        counts_S, rows_S = counts_S[has_rows_S], rows_S[has_rows_S]
        assert computed.hidden_TE is not None
        offsets_T = np.arange(counts_S.sum()) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        rows_T = to_device(np.repeat(rows_S, counts_S) + offsets_T, self._device)
        hidden_TE = computed.hidden_TE[rows_T]
        hidden_TD = self._fusion.read_target(hidden_TE)
        outputs_TE = self._run(slots_S, begins_S, counts_S, hidden_TD)
        room_S = self._batch.max_model_len - 1 - lengths_S
        limits_S = np.minimum(drafts.limits[slots_S, 0], room_S)
        limits_S = self._target_cache.limit_proposals(limits_S, lengths_S, num_unwritten=2)
        limits_S[drafts.num_drafts(slots_S) > 0] = 0
        wants_S = limits_S > 0
        if not samples or not wants_S.any():
            return 0
        last_S = to_device((np.cumsum(counts_S) - 1)[wants_S], self._device)
        slots_S, lengths_S, limits_S = slots_S[wants_S], lengths_S[wants_S], limits_S[wants_S]
        self._draft(slots_S, lengths_S, limits_S, outputs_TE[last_S])
        drafts.add_found(slots_S, limits_S.astype(np.int32))
        return int(limits_S.max())

    def _draft(
        self, slots_S: Int64Array, lengths_S: Int64Array, limits_S: Int32Array, outputs_SE: Tensor
    ) -> None:
        """Write `limits_S` drafts after the tokens of each slot.

        The first draft follows from the hidden states `outputs_SE`.
        """
        tokens = self._batch.host_token_ids_NL
        for index in range(int(limits_S.max())):
            if index:
                goes_on_S = limits_S > index
                slots_S, lengths_S = slots_S[goes_on_S], lengths_S[goes_on_S]
                limits_S, outputs_SE = (
                    limits_S[goes_on_S],
                    outputs_SE[to_device(goes_on_S, self._device)],
                )
                hidden_SD = self._fusion.read_own(outputs_SE)
                begins_S = lengths_S + index - 2
                outputs_SE = self._run(slots_S, begins_S, np.ones_like(slots_S), hidden_SD)
            positions_S = (lengths_S + index).astype(np.int32)
            chosen_S = self._choose(outputs_SE, slots_S.astype(np.int32), positions_S)
            tokens[slots_S, positions_S] = on_host(chosen_S)

    def _choose(self, outputs_SE: Tensor, slots_S: Int32Array, positions_S: Int32Array) -> Tensor:
        """Return the draft tokens [S] at these positions, chosen from the head's hidden states `outputs_SE`."""
        normed_SD = outputs_SE[:, : self._layout.spec.hidden_size]
        if self._token_ids is None:
            return self._target.choose_tokens(normed_SD, slots_S, positions_S)
        logits_SC = as_tensor(self._model.compute_logits(normed_SD))
        return self._target.choose_among(self._token_ids, logits_SC, slots_S, positions_S)

    def _run(
        self, slots_S: SlotArray, begins_S: SlotArray, counts_S: SlotArray, hidden_TD: Tensor
    ) -> Tensor:
        """Run the head at `counts_S` positions per slot, from `begins_S` on. Return its hidden states [T, E]."""
        plan = plan_chunks(slots_S, begins_S, counts_S)
        tokens = self._batch.host_token_ids_NL
        following_T = tokens[plan.slots_T, plan.positions_T + 1]
        embedded_TD = self._fusion.embed(to_device(following_T, self._device))
        inputs = self._fusion.fuse(embedded_TD, hidden_TD)
        self._model.forward(
            inputs.to(self._dtype) if self._in_torch else inputs,
            to_device(plan.positions_T, self._device),
            self._cache.layers,
            self._cache.attention_metadata(self._batch, plan),
        )
        assert self._model.kept_hidden_TE is not None
        return self._model.kept_hidden_TE

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the head on the null block, for `num_tokens` tokens and for one, to compile kernels."""
        for count in (num_tokens, 1):
            plan = even_requests(count, -(-count // (self._batch.max_model_len - 1)))
            counts_S = np.diff(plan.query_start_loc)
            shape = count, self._layout.spec.hidden_size
            hidden_TD = torch.zeros(shape, dtype=torch.float32, device=self._device)
            self._run(plan.slots_S, plan.num_computed_S, counts_S, hidden_TD)


def _read_embedding(
    spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens to their embeddings, for a stage that does not embed tokens."""
    weights = weight_reader(
        checkpoint,
        dtype,
        torch.device("cpu"),
        has_head=False,
        tensor_names=spec.tensor_names,
        is_transposed=spec.has_transposed_matrices,
    )
    rows = spec.vocab_size + spec.num_unused_embeddings
    embedding_VD = weights.read("embed_tokens.weight", rows, spec.hidden_size)
    scale = spec.rounded_embedding_scale(dtype)
    return lambda ids_T: embedding_VD[ids_T].float() * scale
