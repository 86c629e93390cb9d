"""Biases of attention scores that depend on the distance between token and key, as in T5.

Shapes: H query heads of this shard, B buckets of distances, E distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.interface import HeadBlocks
from ...layers.distance_buckets import distance_buckets
from ...layers.layer_spec import LayerSpec
from ...layers.spec import ModelSpec
from ..weights import WeightReader


def read_slopes(spec: ModelSpec, heads: range, device: torch.device) -> Tensor | None:
    """Return the slopes of these heads' ALiBi, or None without ALiBi."""
    if not spec.alibi_slopes:
        return None
    return torch.tensor(spec.alibi_slopes[heads.start : heads.stop], device=device)


def head_blocks(layer: LayerSpec, heads: range, device: torch.device) -> HeadBlocks | None:
    """Return the blocks of keys to which these heads attend, or None if they attend to all."""
    pattern = layer.block_pattern
    if pattern is None:
        return None
    offsets_H = torch.tensor([1 + head * pattern.head_step for head in heads], device=device)
    return HeadBlocks(pattern, offsets_H)


def biases_by_distance(
    spec: ModelSpec, weights: WeightReader, prefix: str, heads: range
) -> Tensor | None:
    """Return each query head's bias for keys from `max_distance` positions before a token to as many after it."""
    if not spec.num_distance_buckets:
        return None
    biases_BH = read_distance_biases(spec, weights, prefix)
    furthest = spec.max_distance
    distances = torch.arange(-furthest, furthest + 1, device=biases_BH.device)
    buckets_E = model_buckets(distances, spec)
    return biases_BH[:, heads.start : heads.stop].T[:, buckets_E].contiguous()


def read_distance_biases(spec: ModelSpec, weights: WeightReader, prefix: str) -> Tensor:
    """Return the stored biases of the attention with this prefix, float32 [buckets, heads]."""
    shape = spec.num_distance_buckets, spec.num_heads
    own = prefix if spec.has_layer_distance_biases else ""
    return weights.read_float32(f"{own}distance_biases.weight", *shape)


def model_buckets(distances: Tensor, spec: ModelSpec) -> Tensor:
    """Return the bucket of each distance in a model's attention."""
    return distance_buckets(
        distances, spec.num_distance_buckets, spec.max_distance, is_causal=spec.is_causal
    )
