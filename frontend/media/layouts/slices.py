"""Images of which a small copy comes first, then the slices of a large one (MiniCPM-V)."""

from __future__ import annotations

import math

from PIL import Image

from ....protocol.config.images.details import SlicesProcessor
from ....protocol.encoder_inputs.inputs import EncoderGrid
from .pixels import Parts, Tile, make_tile, resize
from .resized import check_ratio


def slices(image: Image.Image, config: SlicesProcessor) -> Parts:
    """Return the whole image, and the slices of a large one row by row.

    Raises:
        ValueError: The longer side is too long compared to the shorter one.
    """
    check_ratio(*image.size)
    columns, rows = _grid(image.width, image.height, config)
    grows = columns * rows == 1
    whole = resize(image, *_best_size(*image.size, config, grows=grows), config)
    parts: Parts = [config.start, _tile(whole, config), config.end]
    if grows:
        return parts
    size = (_multiple(image.width, columns) / columns, _multiple(image.height, rows) / rows)
    width, height = _best_size(*size, config, grows=True)
    canvas = resize(image, width * columns, height * rows, config)
    parts.append(config.slices_start)
    for row in range(rows):
        parts += ["\n"] * (row > 0)
        for column in range(columns):
            left, top = column * width, row * height
            slice_ = canvas.crop((left, top, left + width, top + height))
            parts += [config.slice_start, _tile(slice_, config), config.slice_end]
    return [part for part in (*parts, config.slices_end) if part != ""]


def _tile(image: Image.Image, config: SlicesProcessor) -> Tile:
    if config.has_equal_counts:
        return make_tile(image, config)
    rows, columns = image.height // config.unit, image.width // config.unit
    grid = None if config.newline_id is None else EncoderGrid(rows, columns)
    return make_tile(image, config)._replace(num_outputs=rows * columns, grid=grid)


def _grid(width: int, height: int, config: SlicesProcessor) -> tuple[int, int]:
    """Return the columns and rows of slices, or (1, 1) for an image without slices.

    The grid's ratio is the closest to the image's. If several are equally close, the first one determines the number
    of slices, and the grid with the most rows among those with this number is used.
    """
    wanted = min(math.ceil(width * height / config.side**2), config.max_slices)
    best, least = (1, 1), math.inf
    if wanted <= 1:
        return best
    ratio = math.log(width / height)
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > config.max_slices:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            columns = count // rows
            difference = abs(ratio - math.log(columns / rows))
            if difference < least or (difference == least and rows > best[1]):
                best, least = (columns, rows), difference
    return best


def _best_size(
    width: float, height: float, config: SlicesProcessor, *, grows: bool
) -> tuple[int, int]:
    """Return the size of about `side` x `side` pixels, in multiples of the unit; the own one of a smaller image."""
    if grows or width * height > config.side**2:
        return area_size(width, height, config.side, config.unit)
    return _multiple(width, config.unit), _multiple(height, config.unit)


def area_size(width: float, height: float, side: int, unit: int) -> tuple[int, int]:
    """Return the size of about `side` x `side` pixels in this shape. Its sides are multiples of `unit`."""
    ratio = width / height
    height = int(side / math.sqrt(ratio))
    return _multiple(int(height * ratio), unit), _multiple(height, unit)


def _multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)
