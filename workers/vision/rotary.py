"""Rotary embeddings of patches by their column and row in the image (arXiv 2104.09864).

Shapes: P patches, H heads, K head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ROW, COLUMN = range(2)


@dataclass(frozen=True, slots=True)
class PatchRotary:
    """The rotation of queries and keys of `head_dim` elements.

    A head is one part. With the order "halves" (Gemma 4) it is two, of which the first is rotated by the column and the
    second by the row; with "pairs" (Llama 4) it is as many as it has pairs, of which the first half is rotated by the
    column. In a part, element i is rotated with the one half a part behind it. With "mixed" frequencies (Pixtral, arXiv
    2410.07073) the first half of the pairs has every other frequency, by the row, and the second half has the others,
    by the column. "joined" ones are equal for row and column (Qwen2-VL, arXiv 2409.12191). With the order "alternating"
    (Kimi K2.5) a head has as many parts as pairs, too, every other one of which is rotated by the column, and two that
    follow each other have the same frequency. Rotations are in the tower's dtype, or in float32.
    """

    order: Literal["mixed", "halves", "pairs", "joined", "alternating"]
    theta: float
    head_dim: int
    in_float32: bool = False

    @property
    def num_parts(self) -> int:
        """The parts of a head."""
        if self.order in ("pairs", "alternating"):
            return self.head_dim // 2
        return 2 if self.order == "halves" else 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis that each of the K / 2 angles follows: the row or the column."""
        half = self.head_dim // 2
        if self.order == "alternating":
            return (COLUMN, ROW) * (half // 2)
        first = -(-half // 2)
        axes = (COLUMN, ROW) if self.num_parts > 1 else (ROW, COLUMN)
        return (axes[0],) * first + (axes[1],) * (half - first)

    def frequencies(self) -> Tensor:
        """Return the angle of each pair for a step of a row or column, float32 [K / 2]."""
        size = self.head_dim
        if self.order == "mixed":
            frequencies = 1.0 / self.theta ** (torch.arange(0, size, 2).float() / size)
            return torch.cat((frequencies[::2], frequencies[1::2]))
        frequencies = 1.0 / self.theta ** (torch.arange(0, size // 2, 2).float() / (size // 2))
        if self.order == "alternating":
            return frequencies.repeat_interleave(2)
        return frequencies.repeat(2)

    def rotation(self, places_P2: Tensor, dtype: torch.dtype) -> PatchRotation:
        """Return the rotation of patches at these rows and columns."""
        device = places_P2.device
        angles = places_P2.float()[:, list(self.axes)] * self.frequencies().to(device)
        angles = angles.unflatten(1, (1, self.num_parts, -1))
        dtype = torch.float32 if self.in_float32 else dtype
        return PatchRotation(angles.cos().to(dtype), angles.sin().to(dtype))


class PatchRotation(NamedTuple):
    """The cosines and sines of the angles by which a head's elements are rotated, [P, 1, parts, K / (2 * parts)]."""

    cos: Tensor
    sin: Tensor

    def apply(self, x_PHK: Tensor) -> Tensor:
        """Return queries or keys rotated."""
        parts = x_PHK.to(self.cos.dtype).unflatten(-1, (self.cos.shape[2], 2, -1))
        first, second = parts[..., 0, :], parts[..., 1, :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.stack(rotated, -2).flatten(-3).to(x_PHK.dtype)


def grid_places(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return the row and the column of each patch, row by row, int64 [P, 2]."""
    rows = torch.arange(num_rows, device=device)
    return torch.cartesian_prod(rows, torch.arange(num_columns, device=device))
