"""Triton attention that sums a token's values in the same order in a prompt and in decoding (`--batch-invariant`).

Shapes: S requests.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

import torch

from ...protocol.errors import ConfigError
from ..layers.spec import Window
from .interface import AttentionSpec, DeviceBatch
from .kernels.tiles import batch_invariant_tile
from .triton_paged import TritonPagedAttention, TritonPagedMetadata


class BatchInvariantAttention(TritonPagedAttention):
    """Attention that uses the prompt kernel for every request. A single query is a tile, and keys are never split.

    Raises:
        ConfigError: The model has latent attention, or `TritonPagedAttention` does not support it.
    """

    fewest_tiled_queries: ClassVar[int] = 1

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.latent_rank:
            raise ConfigError("latent attention is not supported with --batch-invariant")
        super().__init__(spec)
        self.prefill_tile = batch_invariant_tile(
            self.head_dim, self.num_heads // self.num_kv_heads, self.dtype
        )

    def build_decode(
        self, batch: DeviceBatch, windows: Collection[Window | None]
    ) -> TritonPagedMetadata:
        """Return metadata in which every request is a tile of the prompt kernel."""
        # Compute this from device tensors, because copies from the host cannot be captured in a graph.
        tiles_S2 = torch.zeros((len(batch.seq_lens), 2), dtype=torch.int32, device=self.device)
        tiles_S2[:, 0] = torch.arange(len(batch.seq_lens), device=self.device)
        metadata = super().build_decode(batch, windows)
        return replace(metadata, has_decodes=False, prefill_tiles=tiles_S2)
