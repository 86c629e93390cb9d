"""Attention in plain torch that depends only on the content of tensors, as CUDA graphs require.

T tokens of S requests, L = blocks a row * block size keys, G key/value heads, Q query heads for each, K head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from engine.workers.attention import (
    AttentionLayer,
    AttentionSpec,
    CapturableAttention,
    DeviceBatch,
    IndexQueries,
)
from engine.workers.attention.torch_paged import TorchPagedAttention
from torch import Tensor


@dataclass
class CapturedMetadata:
    batch: DeviceBatch
    spec: AttentionSpec


class GraphTorchPaged(TorchPagedAttention, CapturableAttention):
    def build_captured(
        self, batch: DeviceBatch, windows: Collection[int | None], max_queries: int
    ) -> CapturedMetadata:
        return CapturedMetadata(batch, self.spec)

    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
        index: IndexQueries | None = None,
    ) -> Tensor:
        if not isinstance(metadata, CapturedMetadata):
            return super().forward(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer, index)
        # Lists of work depend on the number of heads, which differs between layers of some models.
        assert metadata.spec == self.spec
        batch = metadata.batch
        slots_T = batch.slot_mapping.long()
        blocks_T, offsets_T = slots_T // self.block_size, slots_T % self.block_size
        is_real_T11 = (slots_T >= 0)[:, None, None]
        for side, new_TGK in enumerate((k_TGK, v_TGK)):
            old_TGK = kv_cache[blocks_T, side, :, offsets_T]
            kv_cache[blocks_T, side, :, offsets_T] = torch.where(is_real_T11, new_TGK, old_TGK)
        tokens_T = torch.arange(len(slots_T))
        # The row of padding tokens does not matter.
        ends_S = batch.query_start_loc[1:].contiguous()
        rows_T = torch.searchsorted(ends_S, tokens_T.int(), right=True).clamp(max=len(ends_S) - 1)
        after_T = ends_S[rows_T] - tokens_T
        length_T1 = (batch.seq_lens[rows_T] - after_T + 1)[:, None]
        keys_TGLK, values_TGLK = (
            kv_cache[batch.block_table[rows_T].long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        )
        q_TGQK = q_THK.unflatten(1, (self.num_kv_heads, -1))
        scores_TGQL = torch.matmul(q_TGQK, keys_TGLK.transpose(2, 3)) * layer.scale
        if layer.softcap is not None:
            scores_TGQL = (scores_TGQL / layer.softcap).tanh() * layer.softcap
        position_L = torch.arange(scores_TGQL.shape[-1])
        is_hidden_TL = position_L >= length_T1
        if layer.window is not None:
            is_hidden_TL |= position_L < length_T1 - layer.window
        scores_TGQL = scores_TGQL.masked_fill(is_hidden_TL[:, None, None], -math.inf)
        return torch.matmul(scores_TGQL.softmax(-1).nan_to_num(0.0), values_TGLK).flatten(1, 2)
