"""Triton attention that leaves long, whole prompts to torch's kernels.

Shapes: T tokens, S requests, B blocks of a prompt, H query heads, V elements of a value.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..batch import AttentionBatch
from ..device.transfers import to_device
from ..layers.window import Window
from .interface import AttentionLayer, AttentionSpec
from .library_prompts import FEWEST_TOKENS, LibraryPrompts
from .triton_paged import TritonPagedAttention, TritonPagedMetadata
from .work_lists import WorkList


class LongPromptMetadata(TritonPagedMetadata, frozen=True):
    """The metadata of a step with long prompts: their tokens and blocks, and the tiles of the other requests."""

    prompts: tuple[tuple[slice, Tensor], ...] = ()
    other_tiles: WorkList | None = None


class LongPromptAttention(TritonPagedAttention):
    """Uses torch's attention for uncached prompts of at least `fewest_tokens` tokens, in layers that it supports."""

    def __init__(
        self,
        spec: AttentionSpec,
        library: LibraryPrompts | None = None,
        fewest_tokens: int = FEWEST_TOKENS,
    ) -> None:
        super().__init__(spec)
        self._library = library or LibraryPrompts(spec)
        self._fewest_tokens = fewest_tokens

    def build(
        self, batch: AttentionBatch, windows: Collection[Window | None]
    ) -> TritonPagedMetadata:
        """Return the metadata of a step, copied to the device."""
        metadata = super().build(batch, windows)
        query_lens_S = np.diff(batch.query_start_loc)
        is_long_S = (query_lens_S >= self._fewest_tokens) & (query_lens_S == batch.seq_lens)
        if not is_long_S.any() or batch.visible is not None:
            return metadata
        tiles = self._prefill_tiles(np.where(is_long_S, 0, query_lens_S), batch.seq_lens)
        prompts = []
        for row in np.flatnonzero(is_long_S).tolist():
            first, last = batch.query_start_loc[row : row + 2].tolist()
            num_blocks = -(-(last - first) // self.block_size)
            prompts.append((slice(first, last), metadata.block_table[row, :num_blocks]))
        copied = {name: getattr(metadata, name) for name in metadata.__struct_fields__}
        others = WorkList(to_device(tiles, self.device), int(tiles[0])) if tiles[0] else None
        return LongPromptMetadata(**copied, prompts=tuple(prompts), other_tiles=others)

    def attend(
        self, q_THK: Tensor, kv_cache: Tensor, metadata: TritonPagedMetadata, layer: AttentionLayer
    ) -> Tensor:
        """Return the attention output [T, H, V] from the cache."""
        if not isinstance(metadata, LongPromptMetadata) or not self._library.supports(layer):
            return super().attend(q_THK, kv_cache, metadata, layer)
        out_THV = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        self._attend(q_THK, out_THV, kv_cache, metadata, metadata.other_tiles, layer)
        for tokens, blocks_B in metadata.prompts:
            out_THV[tokens] = self._library.attend(q_THK[tokens], kv_cache, blocks_B, layer.scale)
        return out_THV
