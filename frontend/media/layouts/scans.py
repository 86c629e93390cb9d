"""Images of which models also read crops: those of long images (Gemma 3), or of large and long ones (Step 3.7)."""

from __future__ import annotations

import math
from typing import Final

from PIL import Image

from ....protocol.config.images.details import CutsProcessor, PanScanProcessor
from .pixels import Parts, make_tile, resize

_NARROW: Final = 32
"""The shorter side in pixels below which a long image is placed on a square (Step 3.7)."""

_LONG, _VERY_LONG = 1.5, 4
"""The ratios of sides above which an image is long (Step 3.7)."""

_REST: Final = 0.2
"""The part of a square above which a rest of an image becomes another one (Step 3.7)."""


def pan_and_scan(image: Image.Image, config: PanScanProcessor) -> Parts:
    """Return the whole image as a tile, followed by its crops if it is long."""
    whole = _tile(image, config)
    crops = _crops(image, config) if config.scans else []
    if not crops:
        return whole
    parts: Parts = ["Here is the original image ", *whole]
    parts.append(" and here are some crops to help you see better ")
    for i, crop in enumerate(crops):
        parts += [" "] * (i > 0) + _tile(crop, config)
    return parts


def _tile(image: Image.Image, config: PanScanProcessor) -> Parts:
    tile = make_tile(resize(image, config.side, config.side, config), config)
    return [config.start, tile, config.end]


def _crops(image: Image.Image, config: PanScanProcessor) -> list[Image.Image]:
    """Return equal crops along the longer side. The last one may be smaller."""
    width, height = image.size
    longer, shorter = max(image.size), min(image.size)
    if longer / shorter < config.min_ratio:
        return []
    count = min(longer // config.min_crop_side, math.floor(longer / shorter + 0.5))
    count = min(max(2, count), config.max_crops)
    side = math.ceil(longer / count)
    if min(side, shorter) < config.min_crop_side:
        return []
    starts = [side * i for i in range(count)]
    if width >= height:
        return [image.crop((x, 0, min(x + side, width), height)) for x in starts]
    return [image.crop((0, y, width, min(y + side, height))) for y in starts]


def cuts(image: Image.Image, config: CutsProcessor) -> Parts:
    """Return the squares that are cut from the image, row by row, then the whole image."""
    longer, shorter = max(image.size), min(image.size)
    if shorter < _NARROW and longer > _VERY_LONG * shorter:
        square = Image.new("RGB", (longer, longer))
        square.paste(image)
        image, shorter = square, longer
    width, height = image.size
    if longer > config.longest:
        scale = config.longest / longer
        width, height = int(width * scale), int(height * scale)
        longer, shorter = max(width, height), min(width, height)
    cut = config.cut_side
    if longer <= config.side:
        cut = shorter if longer > _LONG * shorter else 0
    elif longer > _VERY_LONG * shorter:
        cut = min(shorter, cut)
    parts: Parts = []
    if cut:
        size = [_multiple(length, cut) for length in (width, height)]
        canvas = image if list(image.size) == size else resize(image, size[0], size[1], config)
        for top in range(0, canvas.height, cut):
            for left in range(0, canvas.width, cut):
                right, end = min(left + cut, canvas.width), min(top + cut, canvas.height)
                part = canvas.crop((left, top, right, end))
                part = resize(part, config.cut_side, config.cut_side, config)
                tile = make_tile(part, config)._replace(num_outputs=config.cut_outputs)
                parts += [config.cut_start, tile, config.cut_end]
            parts.append(config.row_end)
        parts.pop()
    whole = image if image.size == (width, height) else resize(image, width, height, config)
    tile = make_tile(resize(whole, config.side, config.side, config), config)
    return [*parts, config.start, tile, config.end]


def _multiple(length: int, cut: int) -> int:
    """Return the multiple of `cut` that is next to a length, or the length itself if it is smaller."""
    if length < cut:
        return length
    return cut * (length // cut + (length % cut > _REST * cut))
