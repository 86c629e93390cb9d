"""The embeddings of images that are read as a grid of tiles with margins (LLaVA-NeXT, LLaVA-OneVision)."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_EXCESS: Final = 1.1
"""A grid is reduced if a side has more than so many times the patches that it should have."""


class AnyresGrid(NamedTuple):
    """The patches of a grid that are not of margins, and what these rows and columns are reduced to."""

    top: int
    left: int
    rows: int
    columns: int
    reduced_rows: int
    reduced_columns: int

    @property
    def num_outputs(self) -> int:
        """The number of embeddings, with one at the end of each row."""
        return self.reduced_rows * (self.reduced_columns + 1)


def anyres_grid(
    original: tuple[int, int], grid: tuple[int, int], num_patches: int, max_tiles: int
) -> AnyresGrid:
    """Return the patches of an image.

    Args:
        original: The width and the height of the image in pixels.
        grid: The columns and the rows of tiles.
        num_patches: The patches of a tile in each direction.
        max_tiles: The number of tiles to which the patches are reduced; 0 for any number.
    """
    width, height = original
    columns, rows = (count * num_patches for count in grid)
    top = left = 0
    # Rounded as transformers does.
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
