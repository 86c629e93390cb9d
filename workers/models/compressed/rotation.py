"""The rotation of the last elements of a head, in pairs of neighbors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.rope import RotaryTables


def rotate_last(x_THK: Tensor, tables: RotaryTables, *, is_back: bool = False) -> Tensor:
    """Rotate the last elements of each head by the angles in `tables`, or by the negative angles."""
    rotary_dim = tables.cos_TPR.shape[-1]
    half = rotary_dim // 2
    cos, sin = tables.cos_TPR[..., :half].float(), tables.sin_TPR[..., half:].float()
    if is_back:
        sin = -sin
    plain_THP, x_THR = x_THK.split((x_THK.shape[-1] - rotary_dim, rotary_dim), -1)
    even, odd = x_THR.float().unflatten(-1, (half, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((plain_THP, rotated.to(x_THK.dtype)), -1)
