"""Compute the layout of an image that is read as a grid of tiles with margins (LLaVA-NeXT, LLaVA-OneVision)."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_EXCESS: Final = 1.1
"""A grid is reduced only if the square root of its excess over the allowed number of patches is above this factor."""


class AnyresGrid(NamedTuple):
    """The patches of a grid of tiles that show the image, and the size to which they are reduced.

    Patches above `top` and left of `left` are margins, and so are as many on the opposite sides.
    """

    top: int
    left: int
    rows: int
    columns: int
    reduced_rows: int
    reduced_columns: int

    @property
    def num_outputs(self) -> int:
        """The number of embeddings, which includes one at the end of each row."""
        return self.reduced_rows * (self.reduced_columns + 1)


def anyres_grid(
    original: tuple[int, int], grid: tuple[int, int], num_patches: int, max_tiles: int
) -> AnyresGrid:
    """Return which patches of a grid show the image, and to how many they are reduced.

    Args:
        original: The width and the height of the image in pixels.
        grid: The number of columns and of rows of tiles.
        num_patches: The number of patches along one side of a tile.
        max_tiles: The number of tiles whose patches remain after the reduction; 0 for no limit.
    """
    width, height = original
    columns, rows = (count * num_patches for count in grid)
    top = left = 0
    # Round in the same way as transformers.
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    rows, columns = rows - 2 * top, columns - 2 * left
    reduced = rows, columns
    if max_tiles:
        excess = math.sqrt(rows * columns / (max_tiles * num_patches**2))
        if excess > _EXCESS:
            reduced = int(rows // excess), int(columns // excess)
    return AnyresGrid(top, left, rows, columns, *reduced)
