"""Images that are split into a grid of tiles, padded at the right and at the bottom (Llama 3.2 Vision and Llama 4)."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from ....protocol.config.images.tiles import MosaicProcessor, TilesProcessor
from ....protocol.encoder_inputs.payloads import ImagePayload
from .grids import least_scale, split
from .pixels import Parts, Tile, make_tile, resize


def tiles(image: Image.Image, config: TilesProcessor) -> Parts:
    """Return the tiles of a grid row by row, then the whole image."""
    side = config.side
    columns, rows = _best_grid(image.width, image.height, config)
    canvas = _on_canvas(image, columns * side, rows * side, config, fills=config.fills)
    if columns * rows == 1:
        return [config.start, config.mark, make_tile(canvas, config), config.end]
    parts: Parts = [config.start]
    for y in range(0, canvas.height, side):
        for x in range(0, canvas.width, side):
            parts += [config.column_end] * (x > 0)
            parts.append(make_tile(canvas.crop((x, y, x + side, y + side)), config))
        parts.append(config.row_end)
    whole = make_tile(resize(image, side, side, config), config)
    return [*parts, config.mark, whole, config.end]


def mosaic(image: Image.Image, config: MosaicProcessor) -> Parts:
    """Return all tiles of a grid as one tile for the encoder, row by row."""
    side = config.side
    columns, rows = least_scale(image.width, image.height, side, config.max_tiles)
    canvas = _on_canvas(image, columns * side, rows * side, config)
    tiles = [tile.tobytes() for row in split(canvas, side) for tile in row]
    payload = ImagePayload(
        side, side * len(tiles), b"".join(tiles), config.scale, config.mean, config.std, columns
    )
    num_outputs = config.num_outputs // config.max_tiles * len(tiles)
    return [Tile(payload, num_outputs, is_read=True)]


def _best_grid(width: int, height: int, config: TilesProcessor) -> tuple[int, int]:
    """Return the columns and rows of the grid that shrinks the image least.

    If several grids need no shrinking, this is the one that enlarges the image least, or most if the processor `fills`
    grids.
    """
    grids = [
        (columns, rows)
        for columns in range(1, config.max_tiles + 1)
        for rows in range(1, config.max_tiles // columns + 1)
    ]
    # Scales are compared in float32, as transformers does it.
    sides_G2 = np.array(grids, np.float32) * np.float32(config.side)
    scale_G = (sides_G2 / np.array((width, height), np.float32)).min(1)
    enlarging = scale_G[scale_G >= 1]
    if not len(enlarging):
        best = scale_G.max()
    else:
        best = enlarging.max() if config.fills else enlarging.min()
    found = [grid for grid, scale in zip(grids, scale_G, strict=True) if scale == best]
    return min(found, key=lambda grid: grid[0] * grid[1])


def _on_canvas(
    image: Image.Image,
    width: int,
    height: int,
    config: TilesProcessor | MosaicProcessor,
    *,
    fills: bool = False,
) -> Image.Image:
    """Return the image at the top left of a black canvas, as large as the canvas allows.

    Unless it `fills` the canvas, sides are not enlarged beyond the side of a tile.
    """
    most = width, height
    if not fills:
        most = (
            min(max(image.width, config.side), width),
            min(max(image.height, config.side), height),
        )
    scale_x, scale_y = most[0] / image.width, most[1] / image.height
    if scale_x < scale_y:
        size = most[0], min(math.floor(image.height * scale_x), most[1])
    else:
        size = min(math.floor(image.width * scale_y), most[0]), most[1]
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resize(image, max(size[0], 1), max(size[1], 1), config))
    return canvas
