"""Attention in Triton kernels with one order of sums, whether a token is part of a prompt or decoded.

S requests.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

import torch

from .interface import AttentionSpec, DeviceBatch
from .kernels.tiles import batch_invariant_tile
from .triton_paged import TritonPagedAttention, TritonPagedMetadata


class BatchInvariantAttention(TritonPagedAttention):
    """The kernel for prompts does every request. A single query is a tile of its own, and its keys are not split."""

    fewest_tiled_queries: ClassVar[int] = 1

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.prefill_tile = batch_invariant_tile(
            self.head_dim, self.num_heads // self.num_kv_heads, self.dtype
        )

    def build_decode(
        self, batch: DeviceBatch, windows: Collection[int | None]
    ) -> TritonPagedMetadata:
        # Made of what is on the device: nothing comes from the host while a graph is captured.
        tiles_S2 = torch.zeros((len(batch.seq_lens), 2), dtype=torch.int32, device=self.device)
        tiles_S2[:, 0] = torch.arange(len(batch.seq_lens), device=self.device)
        metadata = super().build_decode(batch, windows)
        return replace(metadata, has_decodes=False, prefill_tiles=tiles_S2)
