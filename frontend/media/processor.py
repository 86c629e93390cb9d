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
    image = _resize(image, *_fit_longest(image.width, image.height, config.longest_edge), config)
    if not config.splits:
        return Tiles((_payload(_resize(image, side, side, config), config),))
    image = _resize(image, *_whole_tiles(image.width, image.height, side), config)
    if image.width <= side and image.height <= side:
        return Tiles((_payload(image, config),))
    num_rows, num_columns = image.height // side, image.width // side
    corners = [
        (column * side, row * side) for row in range(num_rows) for column in range(num_columns)
    ]
    tiles = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    tiles.append(_resize(image, side, side, config))
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
