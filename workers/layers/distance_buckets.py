"""Ranges of distances between tokens or rows, as in T5."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distance_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, *, is_causal: bool
) -> Tensor:
    """Return the bucket of each distance from a token to a key (T5, arXiv 1910.10683).

    Without a causal mask, half of the buckets are for keys after the token. In each direction, half of the buckets
    cover one distance each. The others cover growing ranges, and the last one all distances from `max_distance` on.
    """
    half = num_buckets if is_causal else num_buckets // 2
    num_exact = half // 2
    away = (-distances).clamp(min=0) if is_causal else distances.abs()
    growth = math.log(max_distance / num_exact)
    log = torch.log(away.clamp(min=1).float() / num_exact) / growth * (half - num_exact)
    bucket = torch.where(away < num_exact, away, num_exact + log.long()).clamp(max=half - 1)
    return bucket if is_causal else bucket + (distances > 0) * half
