"""Layout of images for models that also read crops of long images (pan and scan, Gemma 3)."""

from __future__ import annotations

import math

from PIL import Image

from ....protocol.config.images import PanScanProcessor
from .pixels import Parts, make_tile, resize


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
