"""The tiles into which torch attention divides the queries of a prompt, with their masks."""

import math
from collections.abc import Iterator
from functools import lru_cache

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device.dtypes import torch_device, torch_dtype
from ..layers.window import AfterPrompt, Chunk, Window, first_visible
from .interface import AttentionSpec

_MAX_TILE_QUERIES = 128
_MAX_TILE_SCORES = 1 << 22

# oneDNN splits longer sums, so a query must be on the same side of this limit alone and in a batch.
LONGEST_SINGLE_SUM = 1024


class Tile(msgspec.Struct, frozen=True):
    """Queries of one prompt that are computed together, and the keys that at least one of them attends to."""

    tokens: slice
    keys: slice
    mask_ML: Tensor  # M = queries * Q
    distance_ML: Tensor | None


class QueryTiles:
    """Divides the queries of a prompt into tiles, given the heads and the block size."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._dtype, self._device = torch_dtype(spec.dtype), torch_device(spec.device)
        self._repeats = spec.num_heads // spec.num_kv_heads

    def bidirectional(self, tokens: slice, seq_len: int, window: Window | None) -> Iterator[Tile]:
        """Split a whole sequence, whose tokens also attend to later tokens, into tiles of queries."""
        num_keys = -(-seq_len // self._spec.block_size) * self._spec.block_size
        mask_1L = torch.zeros((1, num_keys), dtype=self._dtype)
        mask_1L[:, seq_len:] = -math.inf
        tile_queries = _tile_queries(self._spec.num_heads, num_keys)
        for start in range(tokens.start, tokens.stop, tile_queries):
            stop = min(start + tile_queries, tokens.stop)
            mask_ML = mask_1L.to(self._device).expand((stop - start) * self._repeats, -1)
            distance_ML: Tensor | None = None
            if isinstance(window, int) or self._spec.reads_distances:
                queries = torch.arange(start - tokens.start, stop - tokens.start)
                distance = queries[:, None] - torch.arange(num_keys)
                distance_ML = distance.repeat_interleave(self._repeats, 0).to(self._device)
                if isinstance(window, int):
                    mask_ML = mask_ML.masked_fill(distance_ML.abs() >= window, -math.inf)
            yield Tile(slice(start, stop), slice(0, num_keys), mask_ML, distance_ML)

    def in_spans(
        self,
        tokens: slice,
        position: int,
        first_key: int,
        window: Window | None,
        visible_Q2: NDArray[np.int32],
    ) -> Iterator[Tile]:
        """Split queries, some of which also attend to later tokens, into tiles."""
        num_queries = tokens.stop - tokens.start
        tile_queries = _tile_queries(self._spec.num_heads, position + num_queries)
        for start in range(0, num_queries, tile_queries):
            stop = min(start + tile_queries, num_queries)
            first = min(first_visible(position + start, window), int(visible_Q2[start, 0]))
            keys_start = first // self._spec.block_size * self._spec.block_size
            keys_stop = (
                -(-int(visible_Q2[stop - 1, 1]) // self._spec.block_size) * self._spec.block_size
            )
            mask_ML, distance_ML = self._tile_mask(
                range(position + start, position + stop),
                range(keys_start, keys_stop),
                window,
                visible_Q2[start:stop],
            )
            yield Tile(
                slice(tokens.start + start, tokens.start + stop),
                slice(keys_start - first_key, keys_stop - first_key),
                mask_ML,
                distance_ML,
            )

    def causal(
        self,
        tokens: slice,
        position: int,
        first_key: int,
        window: Window | None,
        num_prompt_tokens: int = 0,
    ) -> Iterator[Tile]:
        """Split a prompt's queries into tiles, which limits the number of scores in memory."""
        start = tokens.start
        while start < tokens.stop:
            first = position + start - tokens.start
            tile_queries = _tile_queries(self._spec.num_heads, first)
            queries = min(tile_queries, tokens.stop - start)
            if first < LONGEST_SINGLE_SUM:
                queries = min(queries, LONGEST_SINGLE_SUM - first)
            keys_start = self._first_key(first, window)
            keys_stop = -(-(first + queries) // self._spec.block_size) * self._spec.block_size
            context = first - keys_start
            if isinstance(window, Chunk | AfterPrompt) or self._spec.reads_distances:
                mask_ML, distance_ML = self._tile_mask(
                    range(first, first + queries),
                    range(keys_start, keys_stop),
                    window,
                    num_prompt_tokens=num_prompt_tokens,
                )
                yield Tile(
                    slice(start, start + queries),
                    slice(keys_start - first_key, keys_stop - first_key),
                    mask_ML,
                    distance_ML,
                )
                start += queries
                continue
            # One mask serves all tiles: a tile with less context uses the right part of the mask.
            capacity = 1 << context.bit_length()
            mask_ML = _causal_mask(
                tile_queries,
                capacity,
                tile_queries + self._spec.block_size,
                window,
                self._repeats,
                self._spec.dtype,
                self._device,
            )
            yield Tile(
                slice(start, start + queries),
                slice(keys_start - first_key, keys_stop - first_key),
                mask_ML[
                    : queries * self._repeats, capacity - context : capacity + keys_stop - first
                ],
                None,
            )
            start += queries

    def _tile_mask(
        self,
        queries: range,
        keys: range,
        window: Window | None,
        visible_Q2: NDArray[np.int32] | None = None,
        num_prompt_tokens: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mask and, for ALiBi, the distances [M, L] between queries and keys at these positions."""
        query = torch.arange(queries.start, queries.stop)[:, None]
        key = torch.arange(keys.start, keys.stop)
        first = torch.tensor([first_visible(position, window) for position in queries])[:, None]
        last = query
        if visible_Q2 is not None:
            visible = torch.from_numpy(visible_Q2)
            first, last = torch.minimum(first, visible[:, :1]), visible[:, 1:] - 1
        hidden = (key > last) | (key < first)
        if isinstance(window, AfterPrompt):
            hidden |= (key >= num_prompt_tokens) & (key <= query - window.size)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -math.inf)
        mask_ML = mask.repeat_interleave(self._repeats, 0).to(self._device)
        if not self._spec.reads_distances:
            return mask_ML, None
        origin = torch.zeros_like(query) if self._spec.rounds_alibi else query
        return mask_ML, (origin - key).float().repeat_interleave(self._repeats, 0).to(self._device)

    def _first_key(self, position: int, window: Window | None) -> int:
        """Return the start of the block that contains the first key to which a query at this position attends."""
        return first_visible(position, window) // self._spec.block_size * self._spec.block_size


def _tile_queries(num_heads: int, context: int) -> int:
    """Return the number of queries per tile, a power of two, so that few masks serve all tiles."""
    queries = _MAX_TILE_QUERIES
    while queries > 16 and queries * num_heads * (context + queries) > _MAX_TILE_SCORES:
        queries //= 2
    return queries


@lru_cache(maxsize=32)
def _causal_mask(
    num_queries: int,
    context: int,
    num_new_keys: int,
    window: int | None,
    repeats: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a mask [num_queries * repeats, context + num_new_keys], in which query i is at key context + i."""
    query = torch.arange(context, context + num_queries)[:, None]
    distance = query - torch.arange(context + num_new_keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
    return mask.repeat_interleave(repeats, 0).to(device)
