"""Turns images into the tiles that a model's vision tower reads, exactly as transformers' processors with Pillow do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from PIL import Image

from ...protocol.config.model import ImageProcessorConfig, TileLayout
from ...protocol.messages import ImagePayload

_MAX_SIDE: Final = 4096
"""The longest side to which an image is resized before it is split."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one image: the rows of a grid one after the other, then the whole image.

    An image that is not split has one tile, and 0 rows and columns.
    """

    images: tuple[ImagePayload, ...]
    num_rows: int = 0
    num_columns: int = 0


def split_image(image: Image.Image, config: ImageProcessorConfig) -> Tiles:
    """Return the tiles of an image in RGB."""
    side = config.side
    if config.layout is TileLayout.SQUARE:
        return Tiles((_payload(_resize(image, side, side, config), config),))
    if config.layout is TileLayout.CROP:
        return Tiles((_payload(_crop_center(_resize_shortest(image, config), side), config),))
    if config.layout is TileLayout.CANVAS:
        num_columns, num_rows = _best_canvas(image.width, image.height, config)
        canvas = _resize(image, num_columns * side, num_rows * side, config)
        return _split(canvas, image, config)
    image = _resize(image, *_fit_longest(image.width, image.height, config.longest_edge), config)
    if not config.splits:
        return Tiles((_payload(_resize(image, side, side, config), config),))
    image = _resize(image, *_whole_tiles(image.width, image.height, side), config)
    return _split(image, image, config)


def _split(grid: Image.Image, whole: Image.Image, config: ImageProcessorConfig) -> Tiles:
    """Return the tiles of a grid, which are followed by the whole image if there are several."""
    side = config.side
    num_rows, num_columns = grid.height // side, grid.width // side
    if num_rows == num_columns == 1:
        return Tiles((_payload(grid, config),))
    corners = [
        (column * side, row * side) for row in range(num_rows) for column in range(num_columns)
    ]
    tiles = [grid.crop((left, top, left + side, top + side)) for left, top in corners]
    tiles.append(_resize(whole, side, side, config))
    return Tiles(tuple(_payload(tile, config) for tile in tiles), num_rows, num_columns)


def _payload(tile: Image.Image, config: ImageProcessorConfig) -> ImagePayload:
    return ImagePayload(
        tile.width, tile.height, tile.tobytes(), config.scale, config.mean, config.std
    )


def _resize(
    image: Image.Image, width: int, height: int, config: ImageProcessorConfig
) -> Image.Image:
    return image.resize((width, height), Image.Resampling(config.resample))


def _resize_shortest(image: Image.Image, config: ImageProcessorConfig) -> Image.Image:
    short, long = sorted(image.size)
    other = int(config.shortest_edge * long / short)
    if image.width <= image.height:
        return _resize(image, config.shortest_edge, other, config)
    return _resize(image, other, config.shortest_edge, config)


def _crop_center(image: Image.Image, side: int) -> Image.Image:
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _fit_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size with this longest side and, if there is one, an even other one."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
    return max(width, 1), max(height, 1)


def _best_canvas(width: int, height: int, config: ImageProcessorConfig) -> tuple[int, int]:
    """Return the columns and rows of the grid whose shape is most like the image's.

    Of grids with the same shape it is the one with most tiles, unless more than half of them would be made up.
    """
    if not config.splits or config.max_tiles == 1:
        return 1, 1
    sides = range(1, config.max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    ratio, area = width / height, width * height
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        if not config.min_tiles <= columns * rows <= config.max_tiles:
            continue
        difference = abs(ratio - columns / rows)
        is_filled = area > 0.5 * config.side**2 * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the size of the smallest grid of tiles for an image of this shape."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height
