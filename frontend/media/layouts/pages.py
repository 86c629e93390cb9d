"""Pages that are split into a grid of tiles with names (Granite for Docling)."""

from __future__ import annotations

from typing import Final

from PIL import Image

from ....protocol.config.images.tiles import PagesProcessor
from .grids import best_canvas, split, tiles_and_whole
from .pixels import Parts, make_tile, resize

_MAX_TILES_OF_SIDE: Final = 16
"""The maximum number of tiles in each direction for which the tokenizer has names."""


def pages(image: Image.Image, config: PagesProcessor) -> Parts:
    """Return the tiles row by row, each after its name, then the whole image if there are several tiles."""
    side, most = config.side, _max_tiles(image, config)
    least = min(config.min_tiles, most)
    columns, rows = best_canvas(*image.size, side, least, most, _MAX_TILES_OF_SIDE)
    canvas = resize(image, columns * side, rows * side, config)
    tiles = [[make_tile(tile, config) for tile in row] for row in split(canvas, side)]
    is_split = columns * rows > 1
    whole = make_tile(resize(image, side, side, config), config) if is_split else None
    return tiles_and_whole(tiles, whole)


def _max_tiles(image: Image.Image, config: PagesProcessor) -> int:
    most, dense = config.max_tiles, config.dense
    if dense is None or most <= 1 or (dense.max_scale <= 0 and dense.min_aspect <= 0):
        return most
    ratio = image.width / image.height
    if not dense.min_aspect < ratio <= (dense.max_aspect or ratio):
        return most
    least, side = config.min_tiles, config.side
    columns, _ = best_canvas(*image.size, side, least, most, _MAX_TILES_OF_SIDE)
    if dense.max_scale > 0 and columns * side / image.width >= dense.max_scale:
        return most
    return dense.max_tiles
