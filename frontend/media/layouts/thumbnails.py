"""Layout of images for models that split only large images into tiles (LFM2-VL)."""

from __future__ import annotations

import math

from PIL import Image

from ....protocol.config.images.details import ThumbnailProcessor
from .grids import best_canvas, split
from .pixels import Parts, Tile, make_tile, resize


def thumbnail(image: Image.Image, config: ThumbnailProcessor) -> Parts:
    """Return the texts and tiles for an image.

    For a large image these are the tiles row by row, each after its name, followed by the whole image. For a small one
    they are only the whole image.
    """
    whole = _tile(resize(image, *_fit(*image.size, config), config), config)
    if config.max_tiles == 1 or not _is_large(*image.size, config):
        return [config.start, whole, config.end]
    side = config.side
    columns, rows = best_canvas(*image.size, side, config.min_tiles, config.max_tiles)
    if columns * rows == 1:
        tile = _tile(resize(image, side, side, config), config)
        return [config.start, tile, config.end]
    canvas = resize(image, columns * side, rows * side, config)
    parts: Parts = [config.start]
    for row, tiles in enumerate(split(canvas, side), 1):
        for column, tile_image in enumerate(tiles, 1):
            parts += [f"<|img_row_{row}_col_{column}|>", _tile(tile_image, config)]
    if config.adds_whole:
        parts += [config.before_whole, whole]
    return [*parts, config.end]


def _tile(image: Image.Image, config: ThumbnailProcessor) -> Tile:
    num_outputs = image.width // config.unit * (image.height // config.unit)
    return make_tile(image, config)._replace(num_outputs=num_outputs)


def _is_large(width: int, height: int, config: ThumbnailProcessor) -> bool:
    unit = config.unit
    sides = [max(config.patch_size, round(side / unit) * unit) for side in (width, height)]
    return sides[0] * sides[1] > config.max_outputs * unit**2 * config.tolerance


def _fit(width: int, height: int, config: ThumbnailProcessor) -> tuple[int, int]:
    """Return the size of the whole image, in multiples of the unit."""
    unit = config.unit
    sides = [max(1, round(side / unit)) for side in (width, height)]
    num_outputs = sides[0] * sides[1]
    if num_outputs > config.max_outputs:
        shrink = math.sqrt(height * width / (config.max_outputs * unit**2))
        sides = [max(1, math.floor(side / shrink / unit)) for side in (width, height)]
    elif num_outputs < config.min_outputs:
        grow = math.sqrt(config.min_outputs * unit**2 / (height * width))
        sides = [math.ceil(side * grow / unit) for side in (width, height)]
    return sides[0] * unit, sides[1] * unit
