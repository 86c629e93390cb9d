"""Images that are read in about their own size (Pixtral, Gemma 4, Muse)."""

from __future__ import annotations

import itertools
import math

import numpy as np
from PIL import Image

from ....protocol.config.images.sized import (
    BudgetProcessor,
    FitProcessor,
    PatchesProcessor,
    RatioProcessor,
)
from ....protocol.encoder_inputs.payloads import ImagePayload
from .headers import with_header
from .pixels import Parts, Tile, make_tile, resize


def fit(image: Image.Image, config: FitProcessor) -> Parts:
    """Return the image as one tile, shrunk if it exceeds the maximum width or height."""
    width, height = image.size
    ratio = max(width / config.max_width, height / config.max_height)
    if ratio > 1:
        width, height = max(int(width / ratio), 1), max(int(height / ratio), 1)
    columns, rows = (-(-side // config.side_factor) for side in (width, height))
    return _tile(image, columns, rows, config, config.row_end)


def fit_budget(image: Image.Image, config: BudgetProcessor) -> Parts:
    """Return the image as one tile, resized to as many embeddings as `config.num_outputs` allows."""
    columns, rows = budget_grid(*image.size, config.num_outputs, config.side_factor)
    return _tile(image, columns, rows, config, "")


def patches(image: Image.Image, config: PatchesProcessor) -> Parts:
    """Return the image for cross attention, with pixels in float32, resized to whole patches."""
    if config.font:
        if not config.header:
            raise ValueError("its text is drawn on it; send both in a conversation")
        image = with_header(image, config.header, config.font)
    side, most = config.patch_size, config.max_patches
    width, height = image.size
    scale = (most * (side / height) * (side / width)) ** 0.5
    columns, rows = (max(min(int(scale * length / side), most), 1) for length in (width, height))
    size = (columns * side, rows * side)
    # Pillow rounds the pixels of images in RGB.
    channels = [
        np.asarray(channel.convert("F").resize(size, Image.Resampling(config.resample)))
        for channel in image.split()
    ]
    pixels = np.stack(channels, -1).astype("<f4").tobytes()
    mean, std = 0.0, 1.0
    if config.normalizes:
        own = np.asarray(image).transpose(2, 0, 1).astype(np.float32)
        mean, std = float(own.mean()), max(float(own.std()), own.size**-0.5)
    payload = ImagePayload(*size, pixels, config.scale, (mean,) * 3, (std,) * 3, is_float32=True)
    return [Tile(payload, rows * columns, is_read=True)]


def budget_grid(width: int, height: int, num_outputs: int, side: int) -> tuple[int, int]:
    """Return the columns and rows of up to `num_outputs` squares of `side` pixels that keep the shape of an image."""
    scale = math.sqrt(num_outputs * side**2 / (width * height))
    columns, rows = (math.floor(scale * length / side) for length in (width, height))
    if not rows:
        return min(width // height, num_outputs), 1
    if not columns:
        return 1, min(height // width, num_outputs)
    return columns, rows


def fit_ratio(image: Image.Image, config: RatioProcessor) -> Parts:
    """Return the image as one tile of the allowed size whose aspect ratio is closest to the image's.

    Raises:
        ValueError: The image is so long that even one row or column has more than `config.num_outputs` embeddings.
    """
    most, ratio = config.num_outputs, image.height / image.width
    rows, columns = image.height / config.side_factor, image.width / config.side_factor
    if rows * columns > most:
        shrunk = columns / rows
        rows = (most / shrunk) ** 0.5
        columns = rows * shrunk
    # Equally good grids are tried in the same order as by transformers' processor.
    both = {*itertools.product(*((math.floor(x), math.ceil(x)) for x in (rows, columns)))}
    grids = [grid for grid in both if min(grid) >= 1 and math.prod(grid) <= most]
    grids = grids or [(max(1, round(rows)), max(1, round(columns)))]
    best = min(grids, key=lambda grid: abs(grid[0] / grid[1] - ratio))
    if math.prod(best) > most:
        raise ValueError(
            f"it has {image.width} x {image.height} pixels, which take {math.prod(best)} tokens, and at most {most} are "
            "allowed"
        )
    return _tile(image, best[1], best[0], config, "")


def _tile(
    image: Image.Image,
    columns: int,
    rows: int,
    config: FitProcessor | BudgetProcessor | RatioProcessor,
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
