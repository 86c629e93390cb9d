"""Undo the changes that llama.cpp's converter makes to some tensors of mmproj files.

Shapes: R rows, C columns, H heads, K size of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

Changes: TypeAlias = list[tuple[re.Pattern[str], Callable[[Tensor], Tensor]]]

_QUERY_OR_KEY: Final = re.compile(r"\.[qk]_proj\.(weight|bias)$")
_PATCHES: Final = re.compile(r"visual\.patch_embed\.proj\.weight$")
_POSITIONS: Final = re.compile(r"visual\.pos_embed\.weight$")


def changes(kind: str, metadata: Mapping[str, Any]) -> Changes:
    """Return functions from a stored tensor to that of the checkpoint, each with a pattern of the tensors' names.

    `kind` is the type of the projector of images.
    """
    heads = int(metadata.get("clip.vision.attention.head_count") or 1)
    if kind == "hunyuanvl":
        return [(_POSITIONS, _with_class_position)]
    if kind == "minimax_m3":
        return [(_QUERY_OR_KEY, partial(_by_half, num_heads=heads))]
    if kind == "muse-glimmer":
        return [(_QUERY_OR_KEY, partial(_halves, num_heads=heads)), (_PATCHES, _flat)]
    if kind == "nemotron_v2_vl":
        return [(_PATCHES, _flat)]
    return []


def _with_class_position(x_RC: Tensor) -> Tensor:
    """Return a table of positions with an unused row before the others, which the converter removes."""
    return torch.cat((torch.zeros_like(x_RC[:1]), x_RC))


def _flat(x: Tensor) -> Tensor:
    """Return the matrix of a convolution over whole patches."""
    return x.flatten(1)


def _halves(x: Tensor, num_heads: int) -> Tensor:
    """Return rows whose rotated pairs are in two halves of a head, from rows with pairs of neighbors."""
    return x.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_half(x: Tensor, num_heads: int) -> Tensor:
    """Return rows whose first halves of all three axes are together, from rows with one axis after another."""
    x_HK = x.unflatten(0, (num_heads, -1))
    size = x_HK.shape[1] // 2 // 3
    rotated = x_HK[:, : 6 * size].unflatten(1, (3, 2, size)).transpose(1, 2).flatten(1, 3)
    return torch.cat((rotated, x_HK[:, 6 * size :]), 1).flatten(0, 1)
