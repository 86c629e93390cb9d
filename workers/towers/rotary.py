"""Rotate patches by their column and row in the image (rotary embedding, arXiv 2104.09864).

Shapes: P patches, H heads, K head dimension.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

ROW, COLUMN = range(2)


class PatchRotary(msgspec.Struct, frozen=True):
    """The rotation of queries and keys of `head_dim` elements, in the tower's dtype or in float32.

    With "pairs", rows and columns are multiplied by `place_scale`. A patch whose row and column are -1 is rotated by
    `first_angles`, in radians, one for each pair (LLaVA-OneVision 1.5).

    A head is divided into parts. In a part, element i is rotated together with the element half a part later. `order`
    says how parts, axes and frequencies are assigned:

    * "joined" (Qwen2-VL, arXiv 2409.12191): one part. The first half of the pairs follows the row and the second the
      column, with equal frequencies.
    * "columns first" (Muse): as "joined", but the first half of the pairs follows the column.
    * "mixed" (Pixtral, arXiv 2410.07073): as "joined", but the row has every other frequency and the column the rest.
    * "halves" (Gemma 4): two parts, the first for the column and the second for the row.
    * "pairs" (Llama 4): each pair is a part. The first half of the pairs follows the column.
    * "alternating" (Kimi K2.5): each pair is a part. Columns and rows alternate, and two consecutive pairs have the
      same frequency.
    * "thirds" (MiniMax M3): one part. Equally many pairs follow the frame, the row and the column, with equal
      frequencies. All patches have frame 0, and the remaining pairs are not rotated. Checkpoints store the elements of
      heads in `stored_order`.
    * "crossed" (LLaVA-OneVision 2): each pair is a part. An eighth of the angles follows the frame, which is 0, and the
      others follow the row and then the column, with equal frequencies. There are half as many angles as elements, and
      an element has the angle of its index. So the elements of a pair have different angles: this is no rotation.
    * "sequence" (DeepSeek-OCR 2): one part, in which all pairs follow the row, with the frequencies of decoders. With
      `num_rotated` (GLM-ASR), only the first elements of a head are rotated, which checkpoints store in `stored_order`.
    """

    order: Literal[
        "mixed",
        "halves",
        "pairs",
        "joined",
        "columns first",
        "alternating",
        "thirds",
        "crossed",
        "sequence",
    ]
    theta: float
    head_dim: int
    in_float32: bool = False
    num_rotated: int = 0
    place_scale: float = 1.0
    first_angles: tuple[float, ...] = ()

    @property
    def num_parts(self) -> int:
        """The number of parts of a head."""
        if self.order in ("pairs", "alternating", "crossed"):
            return self.head_dim // 2
        return 2 if self.order == "halves" else 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis, row or column, that each of the K / 2 angles follows."""
        half = self.head_dim // 2
        if self.order == "alternating":
            return (COLUMN, ROW) * (half // 2)
        if self.order == "sequence":
            return (ROW,) * half
        if self.order == "crossed":
            return (ROW,) * (5 * half // 8) + (COLUMN,) * (3 * half // 8)
        if self.order == "thirds":
            third = self.head_dim // 6
            return (ROW,) * 2 * third + (COLUMN,) * third + (ROW,) * (half - 3 * third)
        first = -(-half // 2)
        has_columns_first = self.num_parts > 1 or self.order == "columns first"
        axes = (COLUMN, ROW) if has_columns_first else (ROW, COLUMN)
        return (axes[0],) * first + (axes[1],) * (half - first)

    def frequencies(self) -> Tensor:
        """Return each pair's angle per row or column, in radians, float32 [K / 2]."""
        size = self.head_dim
        if self.order == "sequence":
            rotated, frequencies = self.num_rotated or size, torch.zeros(size // 2)
            powers = torch.arange(0, rotated, 2).float() / rotated
            frequencies[: rotated // 2] = 1.0 / self.theta**powers
            return frequencies
        if self.order == "mixed":
            frequencies = 1.0 / self.theta ** (torch.arange(0, size, 2).float() / size)
            return torch.cat((frequencies[::2], frequencies[1::2]))
        if self.order == "thirds":
            third, zeros = size // 6, torch.zeros(size // 2)
            own = 1.0 / self.theta ** (torch.arange(0, 2 * third, 2).float() / (2 * third))
            return torch.cat((zeros[:third], own, own, zeros[3 * third :]))
        if self.order == "crossed":
            count = 3 * size // 16
            own = 1.0 / self.theta ** (torch.arange(count).float() / count)
            return torch.cat((torch.zeros(size // 8), own, own))
        frequencies = 1.0 / self.theta ** (torch.arange(0, size // 2, 2).float() / (size // 2))
        frequencies = frequencies * self.place_scale
        if self.order == "alternating":
            return frequencies.repeat_interleave(2)
        return frequencies.repeat(2)

    @property
    def stored_order(self) -> Tensor | None:
        """The elements of a head as a checkpoint stores them, int64 [K], so that pairs are half a head apart.

        None if they are already.
        """
        num_rotated = self.num_rotated
        if self.order == "thirds":
            num_rotated = 6 * (self.head_dim // 6)
        elif not num_rotated:
            return None
        rotated, others = torch.arange(self.head_dim).split(
            (num_rotated, self.head_dim - num_rotated)
        )
        return torch.cat((rotated.view(2, -1), others.view(2, -1)), 1).flatten()

    def rotation(self, places_P2: Tensor, dtype: torch.dtype) -> PatchRotation:
        """Return the rotation for patches at these rows and columns."""
        device = places_P2.device
        angles = places_P2.float()[:, list(self.axes)] * self.frequencies().to(device)
        if self.first_angles:
            angles = torch.where(places_P2[:, :1] < 0, angles.new_tensor(self.first_angles), angles)
        if self.order == "crossed":
            angles = angles.repeat(1, 2).unflatten(1, (1, self.num_parts, 2, 1))
        else:
            angles = angles.unflatten(1, (1, self.num_parts, 1, -1))
        dtype = torch.float32 if self.in_float32 else dtype
        return PatchRotation(angles.cos().to(dtype), angles.sin().to(dtype))


class PatchRotation(NamedTuple):
    """The cosines and sines of the angles by which a head's elements are rotated, [P, 1, parts, 1, K / (2 * parts)].

    The fourth dimension is 2 if the elements of a pair have different angles.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x_PHK: Tensor) -> Tensor:
        """Return the rotated queries or keys."""
        parts = x_PHK.to(self.cos.dtype).unflatten(-1, (self.cos.shape[2], 2, -1))
        turned = torch.stack((-parts[..., 1, :], parts[..., 0, :]), -2)
        return (parts * self.cos + turned * self.sin).flatten(-3).to(x_PHK.dtype)


def grid_places(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return the row and the column of each patch, row by row, int64 [P, 2]."""
    rows = torch.arange(num_rows, device=device)
    return torch.cartesian_prod(rows, torch.arange(num_columns, device=device))
