"""A head whose layers have no keys and values, and read those of the model: the assistants of Gemma 4.

Each layer reads the cache of the model's last layer of its kind. So there is nothing to compute before the first draft,
and the head runs only to propose. All drafts of a step are predicted at one position: that of the last token, which the
model has not computed yet. They attend to the tokens before it.

Shapes: S slots of a step, T tokens, D hidden size, E elements of a token's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import Int32Array, Int64Array
from ....protocol.config import EngineConfig
from ....protocol.errors import ConfigError
from ...attention import PagedAttention
from ...batch import PersistentBatch, SlotArray, plan_chunks
from ...cpu.drafts import Drafts
from ...device.dtypes import AnyArray
from ...device.transfers import to_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ..kv_cache import attention_by_group
from .assistant import ClusteredOutput
from .computed import ComputedRows
from .draft_head import DraftHead
from .head_target import HeadTarget
from .tensors import HeadTensors


class SharedCacheHead(DraftHead):
    """A head that reads the model's KV cache. With tensor parallelism, each rank has the heads of its part of it."""

    def _arrange(self, config: EngineConfig) -> tuple[ModelSpec, ModelShard, PagedAttention]:
        spec, shard = self._layout.spec, self._target.shard
        count, ranks = len(spec.layers), shard.tensor_parallel.size
        if spec.num_heads % ranks:
            raise ConfigError(
                f"{self._name}: the head has {spec.num_heads} attention heads, which cannot be divided among "
                f"--tensor-parallel-size {ranks} ranks; use a divisor of {spec.num_heads}"
            )
        return (
            spec,
            ModelShard(range(count), count, shard.tensor_parallel),
            self._target.attention,
        )

    def _load(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        shard: ModelShard,
        attention: PagedAttention,
        tensors: HeadTensors,
        on_progress: Callable[[int, int], None],
    ) -> HeadTarget:
        self._clusters: ClusteredOutput | None = None
        if count := self._layout.num_chosen_clusters:
            self._clusters = ClusteredOutput(
                tensors.checkpoint, spec, count, self._dtype, self._device
            )
        return super()._load(config, spec, shard, attention, tensors, on_progress)

    def _make_cache(self, config: EngineConfig) -> None:
        layers = self._model.spec.layers
        self._attention_by_group = attention_by_group(layers, self._model)

    def use_batch(self, batch: PersistentBatch, num_blocks: int) -> None:
        """Prepare to draft for the requests of `batch`."""
        self._batch, self._num_tokens = batch, batch.num_tokens

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Write drafts for the slots that may have drafts. Return the number of passes through the head."""
        rows = self._known_rows(computed)
        limits_S = self._limits(drafts, rows.slots_S)
        wants_S = limits_S > 0
        if not samples or not wants_S.any():
            return 0
        assert computed.hidden_TE is not None
        slots_S, limits_S = rows.slots_S[wants_S], limits_S[wants_S]
        last_S = to_device((rows.rows_S + rows.counts_S - 1)[wants_S], self._device)
        hidden_SD = self.fusion.read_target(computed.hidden_TE[last_S])
        self._draft(slots_S, limits_S, self._continue(slots_S, 0, hidden_SD))
        drafts.add_found(slots_S, limits_S.astype(np.int32))
        return int(limits_S.max())

    def _continue(self, slots_S: Int64Array, index: int, hidden_SD: Tensor) -> Tensor:
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        return self._run_at(
            slots_S, lengths_S - 2, np.ones_like(slots_S), lengths_S + index - 1, hidden_SD
        )

    def choose(self, outputs_SE: Tensor, slots_S: Int32Array, positions_S: Int32Array) -> Tensor:
        """Return the draft tokens [S] at these positions, chosen among the best clusters of tokens if there are any."""
        if self._clusters is None:
            return super().choose(outputs_SE, slots_S, positions_S)
        ids_SX, logits_SX = self._clusters.logits(outputs_SE[:, : self._layout.spec.hidden_size])
        return self._target.choose_among(ids_SX, logits_SX, slots_S, positions_S)

    def run(
        self,
        slots_S: SlotArray,
        begins_S: SlotArray,
        counts_S: SlotArray,
        hidden_TD: Tensor,
        distance: int = 1,
    ) -> Tensor:
        """Run the head for the tokens `distance` positions later. Return its hidden states [T, E]."""
        plan = plan_chunks(slots_S, begins_S, counts_S)
        return self._run_at(slots_S, begins_S, counts_S, plan.positions_T + distance, hidden_TD)

    def _run_at(
        self,
        slots_S: SlotArray,
        begins_S: SlotArray,
        counts_S: SlotArray,
        columns_T: AnyArray,
        hidden_TD: Tensor,
    ) -> Tensor:
        """Run the head at `counts_S` positions per slot, for the tokens in these columns of the batch.

        A token attends up to the position from `begins_S` on, and is rotated for the next one.
        """
        plan = plan_chunks(slots_S, begins_S, counts_S)
        rotary_T3 = np.repeat(plan.positions_T[:, None] + 1, 3, axis=1)
        self._model.rotary_T3 = to_device(rotary_T3, self._device)
        # The last groups of the model may have no layer that the head reads.
        metadata = [
            attention.build(batch, windows)
            for attention, batch, windows in zip(
                self._attention_by_group,
                self._batch.attention_batches(plan),
                self._model.spec.windows_by_group,
                strict=False,
            )
        ]
        following_T = self._batch.host_token_ids_NL[plan.slots_T, columns_T]
        return self._run_layers(plan, following_T, hidden_TD, self._shared_caches(), metadata)

    def _shared_caches(self) -> list[Any]:
        """Return the tensor of the model's cache that each layer reads."""
        own = self._target.shard.layers
        layers = self._target.spec.layers[own.start : own.stop]
        first = list(accumulate((len(layer.cache_groups) for layer in layers), initial=0))
        sources = [layer.kv_source for layer in self._layout.spec.layers]
        return [
            self._target_cache.layers[first[source - own.start]]
            for source in sources
            if source is not None
        ]
