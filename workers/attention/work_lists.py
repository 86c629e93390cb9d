"""Lists on the device of what each program of an attention kernel computes.

Shapes: S requests.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from .interface import DeviceBatch
from .kernels.tiles import power_of_2
from .kernels.work_list import HEADER, list_splits_kernel, list_tiles_kernel

_FEWEST_REQUESTS = 128
"""Minimum number of requests for which the kernels are compiled; larger numbers are rounded up to powers of two."""


class WorkList(msgspec.Struct, frozen=True):
    """Entries for up to `capacity` programs of each head, as `kernels.work_list` writes them."""

    entries: Tensor  # int32 [2 + 2 * capacity]
    capacity: int
    starts: Tensor | None = None  # int32 [S], of splits


def list_tiles(batch: DeviceBatch, fewest_queries: int, tile_queries: int) -> WorkList:
    """List the tiles of the requests with `fewest_queries` or more."""
    num_tokens, num_requests = len(batch.slot_mapping), len(batch.seq_lens)
    # The last tile of each request may be incomplete.
    capacity = num_tokens // tile_queries + min(num_requests, num_tokens // fewest_queries)
    entries = _empty_list(batch, capacity)
    list_tiles_kernel[(1,)](
        entries,
        batch.query_start_loc,
        num_requests,
        FEWEST_QUERIES=fewest_queries,
        TILE_QUERIES=tile_queries,
        NUM_REQUESTS=max(_FEWEST_REQUESTS, power_of_2(num_requests)),
    )
    return WorkList(entries, capacity)


def list_splits(
    batch: DeviceBatch, num_shares: int, min_split_keys: int, most: int, splitting: dict[str, Any]
) -> WorkList:
    """List the splits of the requests with one query, each of which has at most `most`.

    `splitting` are the constants of `list_splits_kernel` that the kernels of attention share.
    """
    num_requests = len(batch.seq_lens)
    # With equal shares, only the last split of each request is an additional one.
    capacity = min(num_shares + num_requests, most * num_requests)
    starts = torch.empty_like(batch.seq_lens)
    entries = _empty_list(batch, capacity)
    list_splits_kernel[(1,)](
        entries,
        starts,
        batch.query_start_loc,
        batch.seq_lens,
        num_requests,
        num_shares,
        min_split_keys,
        **splitting,
        NUM_REQUESTS=max(_FEWEST_REQUESTS, power_of_2(num_requests)),
    )
    return WorkList(entries, capacity, starts)


def _empty_list(batch: DeviceBatch, capacity: int) -> Tensor:
    return batch.seq_lens.new_empty(HEADER.value + 2 * capacity)
