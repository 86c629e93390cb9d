"""Attention in plain torch whose decoding depends only on the content of tensors, as CUDA graphs require.

S requests of one token each, L = blocks a row * block size keys, G key/value heads, Q query heads for each, K head
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from engine.workers.attention import AttentionLayer, CapturableAttention, DeviceBatch
from engine.workers.attention.torch_paged import TorchPagedAttention
from torch import Tensor


@dataclass
class DecodeMetadata:
    batch: DeviceBatch


class GraphTorchPaged(TorchPagedAttention, CapturableAttention):
    def build_decode(self, batch: DeviceBatch, windows: Collection[int | None]) -> DecodeMetadata:
        return DecodeMetadata(batch)

    def forward(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> Tensor:
        if not isinstance(metadata, DecodeMetadata):
            return super().forward(q_THK, k_TGK, v_TGK, kv_cache, metadata, layer)
        batch = metadata.batch
        slots_S = batch.slot_mapping.long()
        blocks_S, offsets_S = slots_S // self.block_size, slots_S % self.block_size
        is_real_S11 = (slots_S >= 0)[:, None, None]
        for side, new_SGK in enumerate((k_TGK, v_TGK)):
            old_SGK = kv_cache[blocks_S, side, :, offsets_S]
            kv_cache[blocks_S, side, :, offsets_S] = torch.where(is_real_S11, new_SGK, old_SGK)
        keys_SGLK, values_SGLK = (
            kv_cache[batch.block_table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        )
        q_SGQK = q_THK.unflatten(1, (self.num_kv_heads, -1))
        scores_SGQL = torch.matmul(q_SGQK, keys_SGLK.transpose(2, 3)) * layer.scale
        if layer.softcap is not None:
            scores_SGQL = (scores_SGQL / layer.softcap).tanh() * layer.softcap
        position_L = torch.arange(scores_SGQL.shape[-1])
        length_S1 = batch.seq_lens[:, None]
        is_hidden_SL = position_L >= length_S1
        if layer.window is not None:
            is_hidden_SL |= position_L < length_S1 - layer.window
        scores_SGQL = scores_SGQL.masked_fill(is_hidden_SL[:, None, None], -math.inf)
        return torch.matmul(scores_SGQL.softmax(-1).nan_to_num(0.0), values_SGLK).flatten(1, 2)
