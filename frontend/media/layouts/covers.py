"""Images that are split into as few tiles as keep most of their pixels (Ovis 2)."""

from __future__ import annotations

from typing import Final

import msgspec
from PIL import Image

from ....protocol.config.images.tiles import CoverProcessor
from .grids import best_canvas, split
from .pixels import Parts, Tile, make_tile, resize

_ENOUGH: Final = 0.9
"""The part of an image's pixels that is enough."""

_START, _WHOLE_END, _COLUMN_END, _ROW_END, _END = range(5)
"""The places of the marks in `CoverProcessor.mark_texts`."""


def cover(image: Image.Image, config: CoverProcessor) -> Parts:
    """Return the whole image, then the tiles row by row if there are several."""
    side = config.side
    columns, rows = 1, 1
    if config.splits and config.max_tiles > 1:
        if config.covers:
            columns, rows = _covering_grid(*image.size, side, config.max_tiles)
        else:
            columns, rows = best_canvas(*image.size, side, config.min_tiles, config.max_tiles)
    whole = resize(image, side, side, config)
    if columns * rows == 1:
        return [_marked(whole, (_START,), (_WHOLE_END, _END), config)]
    parts: Parts = [_marked(whole, (_START,), (_WHOLE_END,), config)]
    canvas = resize(image, columns * side, rows * side, config)
    for row, tiles in enumerate(split(canvas, side), 1):
        for column, tile in enumerate(tiles, 1):
            mark = _COLUMN_END if column < columns else _ROW_END if row < rows else _END
            parts.append(_marked(tile, (), (mark,), config))
    return parts


def _marked(
    image: Image.Image, before: tuple[int, ...], after: tuple[int, ...], config: CoverProcessor
) -> Tile:
    tile = make_tile(image, config)
    texts = config.mark_texts
    return tile._replace(
        payload=msgspec.structs.replace(tile.payload, marks=(before, after)),
        num_outputs=tile.num_outputs + len(before) + len(after),
        before=tuple(texts[mark] for mark in before),
        after=tuple(texts[mark] for mark in after),
    )


def _covering_grid(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the smallest grid whose tiles keep enough pixels, or of the one that keeps most.

    As in transformers, the pixels that are kept are those of the grid with rows and columns exchanged.
    """

    def kept(grid: tuple[int, int]) -> float:
        rows, columns = grid
        heights = _parts(height, rows)
        widths = _parts(width, columns)
        pixels = sum(_kept_pixels(x, y, side) for y in heights for x in widths)
        return pixels / (width * height)

    sides = range(1, max_tiles + 1)
    grids = [(x, y) for x in sides for y in sides if x * y <= max_tiles]
    # Among equals, `min` returns the first one.
    parts = {grid: kept(grid) for grid in sorted(grids, key=lambda grid: grid[0] * grid[1])}
    enough = [grid for grid, part in parts.items() if part > _ENOUGH]
    if enough:
        return min(enough, key=lambda grid: (grid[0] * grid[1], -parts[grid]))
    return min(parts, key=lambda grid: (-parts[grid], grid[0] * grid[1]))


def _parts(length: int, count: int) -> list[int]:
    """Divide a length into equal parts. The last part has what remains, too."""
    part = length // count
    return [part] * (count - 1) + [length - part * (count - 1)]


def _kept_pixels(width: int, height: int, side: int) -> float:
    """Return how many pixels of a part of an image remain after it is shrunk to at most `side` pixels."""
    longer, shorter = max(width, height), min(width, height)
    if longer > side:
        return shorter / longer * side * side
    return longer * shorter
