"""Tiles of an image that overlap, and the features of the whole image.

Shapes: H rows and W columns of patches, D elements of their features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def join_windows(
    pixels: Tensor,
    side: int,
    step: int,
    margins: tuple[int, int],
    encode: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the features [H, W, D] of an image. Each patch is read in the tile that has it in its middle.

    Args:
        pixels: The image, [3, height, width].
        side: The side of a tile in pixels.
        step: The distance of neighboring tiles in pixels.
        margins: The patches of a tile that overlap with those of the tile before it, and of the one after it.
        encode: Returns the features of the patches of a tile. It is called for the tiles row by row.
    """
    tops, lefts = (range(0, length - side + 1, step) for length in pixels.shape[1:])

    def own(start: int, starts: range, count: int) -> slice:
        before = margins[0] if start != starts[0] else 0
        return slice(before, count - (margins[1] if start != starts[-1] else 0))

    rows = []
    for top in tops:
        tiles = []
        for left in lefts:
            features = encode(pixels[:, top : top + side, left : left + side])
            count = len(features)
            tiles.append(features[own(top, tops, count), own(left, lefts, count)])
        rows.append(torch.cat(tiles, 1))
    return torch.cat(rows)
