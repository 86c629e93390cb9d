"""Images that are split into a grid of tiles (Idefics3, InternVL, DeepSeek-OCR 2, …)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from PIL import Image

from ....protocol.config.images.details import ViewsProcessor
from ....protocol.config.images.tiles import (
    BandsProcessor,
    CanvasProcessor,
    CropsProcessor,
    GridProcessor,
)
from ....protocol.encoder_inputs.payloads import ImagePayload
from .pixels import Parts, Tile, in_middle, make_tile, resize, with_margin

_MAX_SIDE: Final = 4096
"""Maximum side in pixels to which an image is resized before it is split."""

_LEAST_SIDE: Final = 10
"""Minimum side in pixels of an image on a canvas of tiles (Phi-4-multimodal)."""

_LEAST_SECOND: Final = 3
"""Minimum number of tiles of the second grid of an image (H2OVL)."""

_AROUND: Final = "<fake_token_around_image>"


def grid(image: Image.Image, config: GridProcessor) -> Parts:
    """Return the tiles of a grid row by row, then the whole image. Each tile follows its name."""
    side = config.side
    image = resize(image, *fit_longest(image.width, image.height, config.longest_edge), config)
    tiles: list[list[Tile]] = []
    if config.splits:
        image = resize(image, *_whole_tiles(image.width, image.height, side), config)
        if image.size != (side, side):
            tiles = [[make_tile(tile, config) for tile in row] for row in split(image, side)]
    whole = image if image.size == (side, side) else resize(image, side, side, config)
    return tiles_and_whole(tiles, make_tile(whole, config))


def tiles_and_whole(tiles: Sequence[Sequence[Tile]], whole: Tile | None) -> Parts:
    """Return the tiles row by row, each after its name, then the whole image if there is one."""
    parts: Parts = []
    for row, of_row in enumerate(tiles, 1):
        for column, tile in enumerate(of_row, 1):
            parts += [f"{_AROUND}<row_{row}_col_{column}>", tile]
        parts.append("\n")
    if whole is None:
        return parts
    if tiles:
        parts.append("\n")
    return [*parts, f"{_AROUND}<global-img>", whole, _AROUND]


def canvas(image: Image.Image, config: CanvasProcessor) -> Parts:
    """Return the tiles of a grid row by row, then the whole image if there are several tiles.

    With `has_whole_first`, return the whole image, then the tiles.
    """
    side = config.side
    if config.has_whole_first:
        return _whole_and_tiles(image, config)
    grids = []
    if config.splits and config.max_tiles > 1:
        if config.least_scale:
            grids = [least_scale(*image.size, side, config.max_tiles)]
        elif config.counts_area:
            grids = [_best_area(*image.size, config)]
        else:
            least = 1 if config.is_double else config.min_tiles
            grids = [best_canvas(*image.size, side, least, config.max_tiles)]
    if config.is_double:
        second = best_canvas(*image.size, side, _LEAST_SECOND, config.max_tiles, without=grids[0])
        grids = [second, *grids]
    tiles = []
    for columns, rows in grids:
        if columns * rows > 1:
            canvas = resize(image, columns * side, rows * side, config)
            tiles += [tile for row in split(canvas, side) for tile in row]
    parts: Parts = [config.start]
    for number, tile in enumerate(tiles, 1):
        label = config.tile_label.replace("{}", str(number))
        parts += [label, make_tile(tile, config), config.tile_end]
    whole = make_tile(resize(image, side, side, config), config)
    return [*parts, config.whole_label, whole, config.tile_end, config.end]


def _whole_and_tiles(image: Image.Image, config: CanvasProcessor) -> Parts:
    side = config.side
    parts: Parts = [make_tile(resize(image, side, side, config), config)]
    if config.splits:
        columns, rows = _enlarging_grid(*image.size, side, config.max_tiles)
        canvas = resize(image, columns * side, rows * side, config)
        parts += [make_tile(tile, config) for row in split(canvas, side) for tile in row]
    return parts


def crops(image: Image.Image, config: CropsProcessor) -> Parts:
    """Return the image on a white canvas of tiles, as one tile.

    Raises:
        ValueError: The image is so long that its shorter side would have fewer than 10 pixels.
    """
    side = config.side
    columns, rows = (-(-length // side) for length in image.size)
    if columns * rows > config.max_tiles:
        columns, rows = best_canvas(*image.size, side, 1, config.max_tiles)
    canvas = Image.new("RGB", (columns * side, rows * side), (255, 255, 255))
    by_width, by_height = (x / y for x, y in zip(canvas.size, image.size, strict=True))
    if by_width < by_height:
        width, height = canvas.width, int(image.height * by_width)
    else:
        width, height = int(image.width * by_height), canvas.height
    if min(width, height) < _LEAST_SIDE:
        raise ValueError(
            f"it would have {width} x {height} pixels, but both sides need at least {_LEAST_SIDE}"
        )
    canvas.paste(resize(image, width, height, config))
    tile = make_tile(canvas, config)
    assert isinstance(tile.payload, ImagePayload)
    payload = msgspec.structs.replace(tile.payload, original_width=width, original_height=height)
    unit = 2 * config.patch_size
    num_columns, num_rows, whole = (-(-length // unit) for length in (width, height, side))
    num_outputs = num_rows * (num_columns + 1) + 1 + whole * (whole + 1)
    return [Tile(payload, num_outputs)]


def bands(image: Image.Image, config: BandsProcessor) -> Parts:
    """Return the image in the middle of a white canvas of tiles, as one tile.

    Raises:
        ValueError: The image is so long that its shorter side would have no pixels.
    """
    # Images are turned, because the order of resizing both sides matters for rounding.
    turns = image.width < image.height
    if turns:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    side, length = config.side, config.row_length
    ratio = image.width / image.height
    columns = 1
    while (columns + 1) * math.ceil((columns + 1) / ratio) <= config.max_tiles:
        columns += 1
    width, height = columns * side, int(columns * side / ratio)
    if not height:
        raise ValueError(
            f"it has {max(image.size)} x {min(image.size)} pixels, and the longer side may be at most {width} times "
            "the shorter one"
        )
    rows = -(-height // side)
    canvas = Image.new("RGB", (width, rows * side), (255, 255, 255))
    canvas.paste(resize(image, width, height, config), (0, (rows * side - height) // 2))
    if turns:
        canvas, columns, rows = canvas.transpose(Image.Transpose.TRANSPOSE), rows, columns
    tile = make_tile(canvas, config)
    assert isinstance(tile.payload, ImagePayload)
    payload = msgspec.structs.replace(
        tile.payload, original_width=canvas.width, original_height=canvas.height
    )
    num_outputs = rows * length * (columns * length + 1) + 1 + length * (length + 1)
    return [Tile(payload, num_outputs)]


def views(image: Image.Image, config: ViewsProcessor) -> Parts:
    """Return the tiles of a large image row by row, then the whole image in a square."""
    side = config.side
    tiles: list[Image.Image] = []
    columns = 1
    if config.splits and max(image.size) > side:
        columns, rows = best_canvas(*image.size, side, config.min_tiles, config.max_tiles)
        canvas = resize(image, columns * side, rows * side, config)
        tiles = [tile for row in split(canvas, side) for tile in row]
    if config.has_rows:
        return _with_rows(image, tiles, columns, config)
    parts: Parts = [_counted(tile, config) for tile in tiles]
    whole = _counted(with_margin(image, config.whole_side, config.margin, config), config)
    payload = msgspec.structs.replace(whole.payload, is_last=True)
    return [*parts, Tile(payload, whole.num_outputs + 1)]


def _with_rows(
    image: Image.Image, tiles: list[Image.Image], columns: int, config: ViewsProcessor
) -> Parts:
    """Return all tiles as one, then the whole image. There is an embedding after each row of both."""
    parts: Parts = []
    if tiles:
        side = config.side
        pixels = b"".join(tile.tobytes() for tile in tiles)
        of_tile = side // config.unit
        num_rows = len(tiles) // columns * of_tile
        grid = ImagePayload(
            side, side * len(tiles), pixels, config.scale, config.mean, config.std, columns
        )
        parts.append(Tile(grid, num_rows * (columns * of_tile + 1)))
    side = config.whole_side
    whole = make_tile(in_middle(image, side, side, config.margin, config), config)
    num_rows = side // config.unit
    payload = msgspec.structs.replace(whole.payload, is_last=True)
    return [*parts, Tile(payload, num_rows * (num_rows + 1) + 1)]


def _counted(image: Image.Image, config: ViewsProcessor) -> Tile:
    num_outputs = (image.width // config.unit) ** 2
    return make_tile(image, config)._replace(num_outputs=num_outputs)


def least_scale(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the grid that changes the image's scale least.

    If every grid shrinks the image, this is the smallest grid that shrinks it least. Otherwise it is the smallest grid
    that enlarges it least.
    """
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if columns * rows <= max_tiles]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = [min(columns * side / width, rows * side / height) for columns, rows in grids]
    enlarging = [scale for scale in scales if scale >= 1]
    return grids[scales.index(min(enlarging) if enlarging else max(scales))]


def _best_area(width: int, height: int, config: CanvasProcessor) -> tuple[int, int]:
    """Return the columns and rows of the grid with a similar aspect ratio that has enough of the image's pixels."""
    sides, aspect = range(1, config.max_tiles + 1), width / height
    counts = range(config.min_tiles, config.max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if columns * rows in counts]
    grids.sort(key=lambda grid: grid[0] * grid[1])

    def fit(grid: tuple[int, int]) -> float:
        own = grid[0] / grid[1]
        share = min(grid[0] * grid[1] * config.side**2 / (width * height), 0.6)
        return share * min(own / aspect, aspect / own)

    return max(grids, key=fit)


def split(image: Image.Image, side: int) -> list[list[Image.Image]]:
    """Split an image into rows of square tiles."""
    return [
        [image.crop((x, y, x + side, y + side)) for x in range(0, image.width, side)]
        for y in range(0, image.height, side)
    ]


def fit_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return a size with this longer side. The shorter side is rounded to an even number."""
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


def best_canvas(
    width: int,
    height: int,
    side: int,
    min_tiles: int,
    max_tiles: int,
    max_side: int = 0,
    without: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Return the columns and rows of the grid whose aspect ratio is closest to the image's, up to `max_side` if given.

    Among grids with the same ratio, the one with the most tiles is chosen, unless more than half of its pixels would
    come from enlarging. The columns do not divide those of `without`, and neither do the rows. If there is no such
    grid, the result is one tile.
    """
    sides = range(1, min(max_tiles, max_side or max_tiles) + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    if without is not None:
        grids = [grid for grid in grids if without[0] % grid[0] and without[1] % grid[1]]
    ratio, area = width / height, width * height
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        if not min_tiles <= columns * rows <= max_tiles:
            continue
        difference = abs(ratio - columns / rows)
        is_filled = area > 0.5 * side**2 * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best


def _enlarging_grid(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the grid in which the shorter side of an image becomes longest.

    If no grid is as large as the image, the grid is the one with the closest aspect ratio, among those with the most
    tiles. Its ratio is not above that of a wide image, and above that of a tall one.
    """
    # Among equals, transformers chooses the last one of its order: by ratio, in the order in which ratios first occur.
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for columns in range(1, count + 1):
            if not count % columns:
                grid = columns, count // columns
                by_ratio.setdefault(grid[0] / grid[1], []).append(grid)
    ratio = width / height
    best, longest = None, -math.inf
    for columns, rows in (grid for grids in by_ratio.values() for grid in grids):
        canvas_width, canvas_height = columns * side, rows * side
        if canvas_width < width or canvas_height < height:
            continue
        scale = min(canvas_width / width, canvas_height / height)
        if ratio > 1:
            shorter: float = math.floor(scale * width / ratio)
        else:
            # As in transformers, the side of a square is not rounded.
            shorter = math.floor(scale * height * ratio) if ratio < 1 else scale * height
        if shorter >= longest:
            best, longest = (columns, rows), shorter
    if best is not None:
        return best
    if ratio >= 1:
        closest = max(each for each in by_ratio if each <= ratio)
        return max(by_ratio[closest])
    closest = min(each for each in by_ratio if each > ratio)
    return max(by_ratio[closest], key=lambda grid: grid[1])


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the size of the smallest grid of whole tiles for an image of this aspect ratio."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height
