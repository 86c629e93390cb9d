"""Images that are read as a single tile (CLIP, SigLIP, DeepSeek-VL)."""

from __future__ import annotations

from PIL import Image

from ....protocol.config.images import CropProcessor, MarginProcessor, SquareProcessor
from .pixels import Parts, make_tile, resize, with_margin


def square(image: Image.Image, config: SquareProcessor) -> Parts:
    """Return the whole image as a tile."""
    return [make_tile(resize(image, config.side, config.side, config), config)]


def in_square(image: Image.Image, config: MarginProcessor) -> Parts:
    """Return the whole image with margins as a tile."""
    square = with_margin(image, config.side, config.margin, config, config.min_side)
    return [config.start, make_tile(square, config), config.end]


def crop(image: Image.Image, config: CropProcessor) -> Parts:
    """Return the middle of the image as a tile."""
    return [make_tile(_crop_center(_resize_shortest(image, config), config.side), config)]


def _resize_shortest(image: Image.Image, config: CropProcessor) -> Image.Image:
    short, long = sorted(image.size)
    other = int(config.shortest_edge * long / short)
    if image.width <= image.height:
        return resize(image, config.shortest_edge, other, config)
    return resize(image, other, config.shortest_edge, config)


def _crop_center(image: Image.Image, side: int) -> Image.Image:
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))
