"""Rotary embeddings of patches by their column and row in the image (arXiv 2104.09864).

Shapes: P patches of R rows and C columns, H heads, K head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.checkpoint.vision.spec import VisionSpec


class PatchRotation(NamedTuple):
    """The cosines and sines of the angles by which a head's elements are rotated, [P, 1, parts, K / (2 * parts)].

    Within each part, element i is rotated with the one half a part behind it.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x_PHK: Tensor) -> Tensor:
        """Return queries or keys rotated."""
        parts = x_PHK.unflatten(-1, (self.cos.shape[2], 2, -1))
        first, second = parts[..., 0, :], parts[..., 1, :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.stack(rotated, -2).flatten(-3)


def rotate_patches(
    spec: VisionSpec, num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype
) -> PatchRotation:
    """Return the rotation of the patches of an image, row by row."""
    size = spec.size_of_heads
    row_P1 = torch.arange(num_rows).repeat_interleave(num_columns)[:, None].float()
    column_P1 = torch.arange(num_columns).repeat(num_rows)[:, None].float()
    if spec.rotary == "halves":
        frequencies = spec.rope_theta ** -(torch.arange(0, size // 2, 2).float() / (size // 2))
        angles = torch.stack((column_P1 * frequencies, row_P1 * frequencies), 1)
    else:
        frequencies = spec.rope_theta ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.cat((row_P1 * frequencies[::2], column_P1 * frequencies[1::2]), -1)
        angles = angles[:, None]
    angles = angles[:, None]
    return PatchRotation(angles.cos().to(device, dtype), angles.sin().to(device, dtype))
