"""Merge the features of squares of patches, and compute fixed positions of patches.

Shapes: P patches, D elements of a feature, M merged rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def squares(x_PD: Tensor, num_columns: int, factor: int) -> Tensor:
    """Return the features of each square of patches, [M, factor ** 2, D]. Incomplete squares are omitted."""
    rows = x_PD.unflatten(0, (-1, num_columns))
    rows = rows[: len(rows) // factor * factor, : num_columns // factor * factor]
    squares = rows.unflatten(1, (-1, factor)).unflatten(0, (-1, factor))
    return squares.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def completed_squares(x_PD: Tensor, num_columns: int, factor: int) -> Tensor:
    """Return the features of each square of patches, with zeros in those at the right and at the bottom."""
    rows = x_PD.unflatten(0, (-1, num_columns))
    missing = [-count % factor for count in rows.shape[:2]]
    x_PD = F.pad(rows, (0, 0, 0, missing[1], 0, missing[0])).flatten(0, 1)
    return squares(x_PD, num_columns + missing[1], factor)


def side_by_side(x_PD: Tensor, num_columns: int, factor: int) -> Tensor:
    """Return the concatenated features of each square of patches."""
    return x_PD if factor == 1 else squares(x_PD, num_columns, factor).flatten(1)


def means(x_PD: Tensor, num_columns: int, factor: int) -> Tensor:
    """Return the mean of the features of each square of patches."""
    return x_PD if factor == 1 else squares(x_PD, num_columns, factor).mean(1)


def waves(rows: int, columns: int, size: int) -> Tensor:
    """Return the positions of patches [P, size]: sines and cosines of the column, then those of the row."""
    frequencies = 1.0 / 10_000 ** (torch.arange(size // 4) / (size / 4))

    def of_axis(count: int) -> Tensor:
        angles = torch.arange(count)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), -1)

    shape = rows, columns, size // 2
    parts = of_axis(columns).expand(shape), of_axis(rows)[:, None].expand(shape)
    return torch.cat(parts, -1).flatten(0, 1)
