"""Images that are padded and split into a grid of tiles (LLaVA-NeXT, LLaVA-OneVision, DeepSeek-VL2)."""

from __future__ import annotations

import math

from PIL import Image

from ....protocol.checkpoint.vision.anyres import anyres_grid
from ....protocol.config.images.tiles import AnyresProcessor, RowsProcessor
from ....protocol.encoder_inputs.payloads import ImagePayload
from .grids import split
from .pixels import Parts, Tile, in_middle, on_square, resize


def anyres(image: Image.Image, config: AnyresProcessor) -> Parts:
    """Return all tiles of an image's grid as one tile for the encoder."""
    side, whole_outputs = config.side, config.num_patches**2
    if not config.splits:
        tile = resize(on_square(image, config), side, side, config)
        return [config.start, _tile([tile], 0, image, config, whole_outputs + 1), config.end]
    columns, rows = _best_grid(image.width, image.height, config)
    canvas = _enlarge(image, columns * side, rows * side, config)
    tiles = [resize(image, side, side, config), *_split(canvas, side)]
    grid = anyres_grid(image.size, (columns, rows), config.num_patches, config.max_tiles)
    num_outputs = whole_outputs + grid.num_outputs
    return [config.start, _tile(tiles, columns, image, config, num_outputs), config.end]


def tiles_with_rows(image: Image.Image, config: RowsProcessor) -> Parts:
    """Return the whole image and all tiles of its grid as one tile."""
    side, length = config.side, config.row_length
    columns, rows = _best_grid(image.width, image.height, config)
    whole, canvas = (
        in_middle(image, x * side, y * side, config.margin, config)
        for x, y in ((1, 1), (columns, rows))
    )
    num_outputs = length * (length + 1) + 1 + rows * length * (columns * length + 1)
    tiles = [whole, *_split(canvas, side)]
    return [config.start, _tile(tiles, columns, image, config, num_outputs), config.end]


def _split(canvas: Image.Image, side: int) -> list[Image.Image]:
    return [tile for row in split(canvas, side) for tile in row]


def _tile(
    tiles: list[Image.Image],
    columns: int,
    image: Image.Image,
    config: AnyresProcessor | RowsProcessor,
    num_outputs: int,
) -> Tile:
    payload = ImagePayload(
        config.side,
        config.side * len(tiles),
        b"".join(tile.tobytes() for tile in tiles),
        config.scale,
        config.mean,
        config.std,
        columns,
        image.width,
        image.height,
    )
    return Tile(payload, num_outputs)


def _best_grid(width: int, height: int, config: AnyresProcessor | RowsProcessor) -> tuple[int, int]:
    """Return the grid in which the image keeps the most pixels. If several do, return the smallest."""

    def kept_and_unused(grid: tuple[int, int]) -> tuple[int, int]:
        columns, rows = (count * config.side for count in grid)
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - columns * rows

    return max(config.grids, key=kept_and_unused)


def _enlarge(image: Image.Image, width: int, height: int, config: AnyresProcessor) -> Image.Image:
    """Return the image in the middle of a black canvas, as large as the canvas allows."""
    scale_x, scale_y = width / image.width, height / image.height
    if scale_x < scale_y:
        size = width, min(math.ceil(image.height * scale_x), height)
    else:
        size = min(math.ceil(image.width * scale_y), width), height
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resize(image, *size, config), ((width - size[0]) // 2, (height - size[1]) // 2))
    return canvas
