"""Images that are read as a single tile (CLIP, SigLIP, DeepSeek-VL, Aria), and in quarters (Idefics2)."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
from PIL import Image

from ....protocol.config.images.single import (
    CropProcessor,
    LongestProcessor,
    MarginProcessor,
    PageProcessor,
    SquareProcessor,
)
from ....protocol.config.images.sized import QuartersProcessor
from ....protocol.encoder_inputs.inputs import EncoderGrid
from ....protocol.encoder_inputs.payloads import ImagePayload
from .pixels import Parts, make_tile, on_square, resize, with_margin

_GAP: Final = 2.0
"""The ratio of sides above which Pillow shrinks an image in two steps, as transformers shrinks pages of Nougat."""

_LIGHT: Final = 200
"""The lowest value, from 0 for the darkest to 255 for the lightest pixel, of pixels in margins."""

_MAX_SIDE: Final = 8192
"""Maximum side, in pixels, of an image that is then shrunk to a page."""


def square(image: Image.Image, config: SquareProcessor) -> Parts:
    """Return the whole image as a tile."""
    if config.pads:
        image = on_square(image, config)
    tile = make_tile(resize(image, config.side, config.side, config), config)
    if config.grid_side:
        grid = EncoderGrid(config.grid_side, config.grid_side, margin=1, is_moment=True)
        before, after = ((text,) for text in config.mark_texts)
        return [tile._replace(grid=grid, before=before, after=after)]
    tile = tile._replace(after=config.mark_texts, is_read=config.is_read)
    return [config.start, tile, config.end]


def in_square(image: Image.Image, config: MarginProcessor) -> Parts:
    """Return the whole image with margins as a tile, perhaps with a larger copy of it."""
    squares = []
    for each in (config.fine, config):
        if each is not None:
            image = with_margin(image, each.side, each.margin, each, each.min_side)
            squares.append(make_tile(image, each))
    tile = squares.pop()
    if squares:
        payload = msgspec.structs.replace(tile.payload, fine=squares[0].payload)
        tile = tile._replace(payload=payload)
    return [config.start, tile, config.end]


def on_page(image: Image.Image, config: PageProcessor) -> Parts:
    """Return the image in the middle of a page, for cross attention. Sizes are rounded down."""
    if config.crops_margins:
        image = _without_margins(image)
    if config.fills_width:
        image = _fill(image, config)
    width, height = image.size
    ratio = width / height
    if height > config.height:
        width, height = int(config.height * ratio), config.height
    if width > config.width:
        width, height = config.width, int(config.width / ratio)
    if (width, height) != image.size:
        image = resize(image, max(width, 1), max(height, 1), config)
    page = Image.new(
        "RGB", (config.width, config.height), "black" if config.fills_width else "white"
    )
    page.paste(image, ((config.width - image.width) // 2, (config.height - image.height) // 2))
    return [make_tile(page, config)._replace(is_read=True)]


def _fill(image: Image.Image, config: PageProcessor) -> Image.Image:
    """Return the image with the shorter side of a page, or shrunk to the page if it is longer."""
    size = _with_shortest(image.size, min(config.width, config.height))
    # Very long images are resized once.
    if max(size) <= _MAX_SIDE:
        image = resize(image, *size, config)
    width, height = size
    if width > config.width and width > height:
        width, height = config.width, int(height * config.width / width)
    elif height > config.height:
        width, height = int(width * config.height / height), config.height
    if (width, height) == image.size:
        return image
    shrunk = max(width, 1), max(height, 1)
    if config.shrink_resample is None:
        return resize(image, *shrunk, config)
    return image.resize(shrunk, Image.Resampling(config.shrink_resample), reducing_gap=_GAP)


def _without_margins(image: Image.Image) -> Image.Image:
    """Return the part of the image with all of its dark pixels."""
    gray = np.asarray(image.convert("L"), np.float64)
    darkest, lightest = gray.min(), gray.max()
    if darkest == lightest:
        return image
    is_dark = (gray - darkest) / (lightest - darkest) * 255 < _LIGHT
    return image.crop(Image.fromarray(is_dark).getbbox())


def crop(image: Image.Image, config: CropProcessor) -> Parts:
    """Return the middle of the image as a tile."""
    tile = make_tile(_crop_center(_resize_shortest(image, config), config.side), config)
    return [config.start, tile, config.end]


def longest(image: Image.Image, config: LongestProcessor) -> Parts:
    """Return the image at the top left of a black square as a tile."""
    scale = config.side / max(image.size)
    width, height = (max(int(length * scale), config.least) for length in image.size)
    if image.width >= image.height:
        width = config.side
    else:
        height = config.side
    square = Image.new("RGB", (config.side,) * 2)
    square.paste(resize(image, width, height, config))
    tile = make_tile(square, config)
    assert isinstance(tile.payload, ImagePayload)
    payload = msgspec.structs.replace(tile.payload, original_width=width, original_height=height)
    return [tile._replace(payload=payload)]


def quarters(image: Image.Image, config: QuartersProcessor) -> Parts:
    """Return the quarters of the image, if it is split, then the whole image.

    Raises:
        ValueError: It is split, and a side has only one pixel.
    """
    pictures = [image]
    if config.splits:
        if min(image.size) < 2:
            raise ValueError(
                f"it has {image.width} x {image.height} pixels, but both sides need at least 2"
            )
        xs, ys = ((0, length // 2, length) for length in image.size)
        boxes = [(x, y, right, end) for y, end in pairwise(ys) for x, right in pairwise(xs)]
        pictures = [*(image.crop(box) for box in boxes), image]
    parts: Parts = [config.joint]
    for picture in pictures:
        width, height = picture.size
        ratio = width / height
        if width >= height and width > config.longest:
            width, height = config.longest, int(config.longest / ratio)
        elif height > width and height > config.longest:
            width, height = int(config.longest * ratio), config.longest
        width, height = max(width, config.shortest), max(height, config.shortest)
        unit = config.patch_size
        resized = resize(picture, width, height, config)
        shown = resized.crop((0, 0, width // unit * unit, height // unit * unit))
        parts += [make_tile(shown, config), config.joint]
    return parts


def _resize_shortest(image: Image.Image, config: CropProcessor) -> Image.Image:
    return resize(image, *_with_shortest(image.size, config.shortest_edge), config)


def _with_shortest(size: tuple[int, int], length: int) -> tuple[int, int]:
    """Return a width and a height that are scaled so that the shorter one has this length."""
    width, height = size
    if width <= height:
        return length, int(length * height / width)
    return int(length * width / height), length


def _crop_center(image: Image.Image, side: int) -> Image.Image:
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))
