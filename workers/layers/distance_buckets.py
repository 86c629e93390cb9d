"""Ranges of distances between tokens or rows, as in T5."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_buckets(distances: Tensor, span: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, from 0 to 2 * `span` - 1 (DeBERTa-v2, arXiv 2006.03654).

    Distances up to half of the span have a bucket each, and the others cover growing ranges up to `max_distance`.
    """
    half = span // 2
    away = distances.abs().clamp(min=half)
    growth = torch.log(torch.tensor((max_distance - 1) / half))
    steps = torch.ceil(torch.log(away / half) / growth * (half - 1)) + half
    far = (steps * distances.sign()).long()
    return linear_buckets(torch.where(distances.abs() <= half, distances, far), span)


def linear_buckets(distances: Tensor, span: int) -> Tensor:
    """Return the bucket of each distance, from 0 to 2 * `span` - 1, each of which has one but the furthest."""
    return (distances + span).clamp(0, 2 * span - 1)


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
