"""Compute the embeddings of an image from the embeddings of its tiles.

Shapes: T tiles, P patches of a tile, D hidden size of the decoder, K embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.anyres import anyres_grid
from ....protocol.encoder_inputs.payloads import ImagePayload


def join_tiles(x_TPD: Tensor, newline_D: Tensor, image: ImagePayload, max_tiles: int) -> Tensor:
    """Return the embeddings [K, D] of the whole image, then of the rows of the grid without its margins.

    `newline_D` is appended to each row of the grid, and to an image without a grid.
    """
    newline_1D = newline_D[None].to(x_TPD.dtype)
    if not image.grid_columns:
        return torch.cat((x_TPD[0], newline_1D))
    num_patches, columns = round(x_TPD.shape[1] ** 0.5), image.grid_columns
    x = place_tiles(x_TPD[1:], columns)
    original = image.original_width, image.original_height
    grid = anyres_grid(original, (columns, len(x) // num_patches), num_patches, max_tiles)
    x = x[grid.top : grid.top + grid.rows, grid.left : grid.left + grid.columns]
    size = grid.reduced_rows, grid.reduced_columns
    if size != (grid.rows, grid.columns):
        x = F.interpolate(x.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)
    return torch.cat((x_TPD[0], end_rows(x, newline_D)))


def place_tiles(x_TPD: Tensor, columns: int) -> Tensor:
    """Return the embeddings [rows, columns, D] of a grid of tiles, which has this number of columns of tiles."""
    side = round(x_TPD.shape[1] ** 0.5)
    tiles = x_TPD.unflatten(0, (-1, columns)).unflatten(2, (side, side))
    return tiles.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)


def end_rows(x: Tensor, newline_D: Tensor) -> Tensor:
    """Return the embeddings [K, D] of a grid [rows, columns, D], with `newline_D` after each row."""
    ends = newline_D.to(x.dtype).expand(len(x), 1, -1)
    return torch.cat((x, ends), 1).flatten(0, 1)


def reduce_frame(x_PD: Tensor) -> Tensor:
    """Return the embeddings of a video frame, interpolated to half the rows and columns, rounded up."""
    side = round(len(x_PD) ** 0.5)
    half = -(-side // 2)
    x = x_PD.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    return F.interpolate(x, (half, half), mode="bilinear")[0].permute(1, 2, 0).flatten(0, 1)
