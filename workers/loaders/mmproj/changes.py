"""Undo the changes that llama.cpp's converter makes to some tensors of mmproj files.

Shapes: R rows, C columns, H heads, K size of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from .names import KIMI_POSITIONS, PATCHES, UNIFIED

Changes: TypeAlias = list[tuple[re.Pattern[str], Callable[[Tensor], Tensor]]]

_QUERY_OR_KEY: Final = re.compile(r"\.[qk]_proj\.(weight|bias)$")
_QUERY_OR_KEY_WEIGHT: Final = re.compile(r"[qk]_proj\.weight$")
_AUDIO_QUERY_OR_KEY: Final = re.compile(r"audio_tower.*\.[qk]_proj\.(weight|bias)$")
_JOINED: Final = re.compile(r"\.wqkv\.")
_GRID_PATCHES: Final = re.compile(r"visual\.patch_embed\.proj\.weight$")
_GRID_POSITIONS: Final = re.compile(r"visual\.pos_embed\.weight$")
_PATCHES: Final = re.compile(rf"^{re.escape(PATCHES)}$")


def changes(kind: str, audio_kind: str, metadata: Mapping[str, Any]) -> Changes:
    """Return functions from a stored tensor to that of the checkpoint, each with a pattern of the tensors' names.

    `kind` is the type of the projector of images, and `audio_kind` that of the projector of audio clips.
    """
    heads = int(metadata.get("clip.vision.attention.head_count") or 1)
    found = list(_COMMON)
    if kind == "hunyuanvl":
        found.append((_GRID_POSITIONS, _with_class_position))
    if kind == "minimax_m3":
        found.append((_QUERY_OR_KEY, partial(_by_half, num_heads=heads)))
    if kind == "muse-glimmer":
        found.append((_QUERY_OR_KEY, partial(_halves, num_heads=heads)))
    if kind in ("muse-glimmer", "nemotron_v2_vl"):
        found.append((_GRID_PATCHES, _flat))
    if kind in ("gemma4v", "lfm2", "phi4"):
        found.append((_PATCHES, _flat_by_pixel))
    if kind in ("lightonocr", "pixtral"):
        found.append((_QUERY_OR_KEY_WEIGHT, partial(_halves, num_heads=heads)))
    if kind == "kimik25":
        found.append((_JOINED, partial(_by_row, num_heads=heads)))
    if audio_kind == "glma":
        heads = int(metadata.get("clip.audio.attention.head_count") or 1)
        found.append((_AUDIO_QUERY_OR_KEY, partial(_first_halves, num_heads=heads)))
    return found


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


def _flat_by_pixel(x: Tensor) -> Tensor:
    """Return the matrix of a convolution over whole patches, with the elements of a pixel together."""
    return x.permute(0, 2, 3, 1).flatten(1)


def _by_row(x: Tensor, num_heads: int) -> Tensor:
    """Return joined rows with the elements that are rotated by the row before those of the column, as neighbors."""
    joined = x.unflatten(0, (3, num_heads, 2, -1, 2))
    rotated = joined[:2].transpose(2, 3)
    return torch.cat((rotated.flatten(0, 4), joined[2].flatten(0, 3)))


def _first_halves(x: Tensor, num_heads: int) -> Tensor:
    """Return rows whose rotated pairs, in the first half of a head, are neighbors, from rows with two parts of it."""
    halves = x.unflatten(0, (num_heads, 2, -1))
    rotated = halves[:, 0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.stack((rotated, halves[:, 1]), 1).flatten(0, 2)


def _square(x: Tensor) -> Tensor:
    """Return a table of positions with rows and columns."""
    if x.ndim != 2:
        return x
    side = math.isqrt(len(x))
    return x.view(side, side, -1)


def _by_pixel(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is ordered by pixel, from one that is ordered by channel."""
    return x.unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2)


def _before_softplus(x: Tensor) -> Tensor:
    """Return the argument of the function softplus, which the converter applies, and so does the tower."""
    return torch.log(torch.expm1(x.double()))


_COMMON: Final[Changes] = [
    (re.compile(rf"^{re.escape(KIMI_POSITIONS)}$"), _square),
    # The converter adds 1 to this norm, as to Gemma's other norms.
    (re.compile(r"projector\.mm_soft_emb_norm\.weight$"), lambda x: x - 1),
    (re.compile(rf"^{UNIFIED}pos_embedding$"), lambda x: x.transpose(0, 1)),
    (re.compile(rf"^{UNIFIED}(patch_dense\.weight|patch_ln1\.(weight|bias))$"), _by_pixel),
    (re.compile(r"attention\.attn\.per_dim_scale$"), _before_softplus),
    (re.compile(r"^resampler\.proj\.weight$"), lambda x: x.T),
]
"""Changes of tensors whose names only some kinds have."""
