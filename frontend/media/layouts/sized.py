"""Images that are read in about their own size (Pixtral, Gemma 4)."""

from __future__ import annotations

import math

from PIL import Image

from ....protocol.config.images import BudgetProcessor, FitProcessor
from .pixels import Parts, make_tile, resize


def fit(image: Image.Image, config: FitProcessor) -> Parts:
    """Return the image as a tile that is at most as large as the maximum size."""
    width, height = image.size
    ratio = max(width / config.max_width, height / config.max_height)
    if ratio > 1:
        width, height = max(int(width / ratio), 1), max(int(height / ratio), 1)
    columns, rows = (-(-side // config.side_factor) for side in (width, height))
    return _tile(image, columns, rows, config, config.row_end)


def fit_budget(image: Image.Image, config: BudgetProcessor) -> Parts:
    """Return the image as a tile with as many embeddings as the budget allows."""
    width, height = image.size
    scale = math.sqrt(config.num_outputs * config.side_factor**2 / (width * height))
    columns = math.floor(scale * width / config.side_factor)
    rows = math.floor(scale * height / config.side_factor)
    if not rows:
        rows, columns = 1, min(width // height, config.num_outputs)
    elif not columns:
        rows, columns = min(height // width, config.num_outputs), 1
    return _tile(image, columns, rows, config, "")


def _tile(
    image: Image.Image,
    columns: int,
    rows: int,
    config: FitProcessor | BudgetProcessor,
    row_end: str,
) -> Parts:
    factor = config.side_factor
    if image.size != (columns * factor, rows * factor):
        image = resize(image, columns * factor, rows * factor, config)
    if isinstance(config, FitProcessor) and config.output_side:
        columns, rows = (side // config.output_side for side in image.size)
        if not columns * rows:
            raise ValueError(
                f"it would have {image.width} x {image.height} pixels, but both sides need at least "
                f"{config.output_side}"
            )
    tile = make_tile(image, config)._replace(num_outputs=columns * rows)
    if row_end:
        tile = tile._replace(row_length=columns, separator=row_end)
    return [config.start, tile, config.end]
