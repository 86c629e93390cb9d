"""Images of any size, which become one grid of embeddings (Qwen-VL, Kimi)."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from PIL import Image

from ....protocol.config.images.sized import (
    MAX_RATIO,
    CornerProcessor,
    PadProcessor,
    ResizeProcessor,
)
from ....protocol.encoder_inputs.inputs import EncoderGrid
from ....protocol.encoder_inputs.payloads import ImagePayload
from .pixels import Parts, Tile, interpolate, make_tile, resize

_SCALE_STEP: Final = 1e-5
"""The precision of the factor by which Isaac scales an image."""

_SCALE_DECREASE: Final = 0.02
"""The difference of the factors by which Youtu-VL tries to scale an image."""


def resized(image: Image.Image, config: ResizeProcessor) -> Parts:
    """Return the image in the valid size that is closest to its own."""
    size = image.size
    if config.grows in ("floor", "round"):
        grow = grown_size if config.grows == "floor" else grown_rounded
        size = grow(*size, config.unit)
        check_ratio(*size, image.size)
    if config.grows == "scaled":
        size = _scaled(*size, config)
    elif config.grows == "stepped":
        size = _stepped(*size, config)
    elif config.patch_size:
        size = _whole_patches(*size, config)
    else:
        size = fit_size(*size, config.unit, config.min_pixels, config.max_pixels)
    is_moment = config.grows == "scaled"
    image = interpolate(image, *size) if is_moment else resize(image, *size, config)
    payload = ImagePayload(
        image.width, image.height, image.tobytes(), config.scale, config.mean, config.std
    )
    columns = image.width // config.unit + (config.newlines in ("framed", "plain"))
    margin = int(config.newlines in ("framed", "ends"))
    grid = EncoderGrid(image.height // config.unit, columns, margin=margin, is_moment=is_moment)
    if config.size_end:
        start = f"{config.start}{grid.rows}*{grid.columns}{config.size_end}"
        tile = Tile(payload, grid.num_tokens, row_length=columns, separator=config.row_end)
        return [start, tile, config.end]
    return [config.start, Tile(payload, grid.num_tokens, grid=grid), config.end]


def grown_size(width: int, height: int, unit: int) -> tuple[int, int]:
    """Return a size with the same aspect ratio whose sides have at least `unit` pixels."""
    least = min(width, height)
    if least >= unit:
        return width, height
    return int(width * (unit / least)), int(height * (unit / least))


def grown_rounded(width: int, height: int, unit: int) -> tuple[int, int]:
    """Return a size whose sides have at least `unit` pixels: scale until the height has, then until the width has."""
    if height < unit:
        width, height = round(width * unit / height), unit
    if width < unit:
        width, height = unit, round(height * unit / width)
    return width, height


def _whole_patches(width: int, height: int, config: ResizeProcessor) -> tuple[int, int]:
    """Return a size in multiples of `unit` close to the image's, whose sides are first rounded up to patches.

    The patches of an oblong image may be more than the maximum, because each side has at least `unit` pixels.
    """
    check_ratio(width, height)
    patch = config.patch_size
    merge = config.unit // patch
    least, most = (pixels // patch**2 for pixels in (config.min_pixels, config.max_pixels))
    sides = [round(side / patch + 0.5) for side in (height, width)]
    scale = min(math.sqrt(most / math.prod(sides)), 1.0)
    sides = [math.floor(scale * side) for side in sides]
    if most > least and 0 < math.prod(sides) < least:
        scale = math.sqrt(least / math.prod(sides))
        sides = [math.ceil(scale * side) for side in sides]
    for index in (0, 1):
        remainder = sides[index] % merge
        if remainder:
            larger = sides[index] + merge - remainder
            fits = larger * sides[1 - index] <= most
            sides[index] = larger if fits else max(merge, sides[index] - remainder)
    return max(merge, sides[1]) * patch, max(merge, sides[0]) * patch


def _scaled(width: int, height: int, config: ResizeProcessor) -> tuple[int, int]:
    """Return a size in multiples of `unit`, scaled by the factor that a bisection finds for the limits.

    Raises:
        ValueError: The aspect ratio of the image is above the maximum.
    """
    check_ratio(width, height)

    def size(scale: float) -> tuple[int, int]:
        sides = (math.ceil(scale * side / config.unit) for side in (width, height))
        columns, rows = (max(1, side) * config.unit for side in sides)
        return columns, rows

    num_pixels = math.prod(size(1.0))
    if config.min_pixels <= num_pixels <= config.max_pixels:
        return size(1.0)
    grows = num_pixels < config.min_pixels
    low, high = (1.0, 100.0) if grows else (_SCALE_STEP / 10, 1.0)
    while high - low >= _SCALE_STEP:
        middle = (low + high) / 2
        num_pixels = math.prod(size(middle))
        is_low = num_pixels < config.min_pixels if grows else num_pixels <= config.max_pixels
        low, high = (middle, high) if is_low else (low, middle)
    return size(high if grows else low)


def _stepped(width: int, height: int, config: ResizeProcessor) -> tuple[int, int]:
    """Return a size in multiples of `unit`, scaled by the first factor of many that keeps it below the maximum."""
    scale = 1.0
    while True:
        sides = (math.ceil(side * scale / config.unit) for side in (width, height))
        columns, rows = (max(1, side) * config.unit for side in sides)
        # With a scale of 0, both sides have one unit, which no maximum is below.
        if columns * rows <= config.max_pixels:
            return columns, rows
        scale -= _SCALE_DECREASE


def padded(image: Image.Image, config: PadProcessor) -> Parts:
    """Return the image at the top left of a black canvas, shrunk if it is too large."""
    patch, most = config.patch_size, config.max_side * config.patch_size
    num_patches = max(1, image.height // patch) * max(1, image.width // patch)
    scale = min(1.0, math.sqrt(config.max_patches / num_patches), *(most / x for x in image.size))
    width, height = (min(max(1, int(side * scale)), most) for side in image.size)
    columns, rows = (-(-side // config.unit) for side in (width, height))
    canvas = Image.new("RGB", (columns * config.unit, rows * config.unit))
    canvas.paste(resize(image, width, height, config))
    payload = ImagePayload(
        *canvas.size,
        canvas.tobytes(),
        config.scale,
        config.mean,
        config.std,
        original_width=width,
        original_height=height,
    )
    return [Tile(payload, rows * columns)]


def cornered(image: Image.Image, config: CornerProcessor) -> Parts:
    """Return the image at the top left of a black canvas, which determines its size."""
    columns, rows = _canvas_of(*image.size, config)
    target = columns * config.unit, rows * config.unit
    scale = min(x / y for x, y in zip(target, image.size, strict=True))
    if image.width * image.height >= config.min_outputs * config.unit**2:
        scale = min(1.0, scale)
    width, height = (
        max(1, min(x, math.floor(y * scale))) for x, y in zip(target, image.size, strict=True)
    )
    canvas = Image.new("RGB", target)
    canvas.paste(resize(image, width, height, config))
    return [make_tile(canvas, config)._replace(num_outputs=rows * columns)]


def _canvas_of(width: int, height: int, config: CornerProcessor) -> tuple[int, int]:
    """Return the columns and rows of embeddings that an image fills."""
    unit, least, most = config.unit, config.min_outputs, config.num_outputs
    columns, rows = -(-width // unit), -(-height // unit)
    if columns * rows < least:
        scale = math.sqrt(least * unit**2 / (width * height))
        columns, rows = (-(-max(1, math.ceil(side * scale)) // unit) for side in (width, height))
    if columns * rows <= most:
        return columns, rows

    def canvas(content_height: int) -> tuple[int, int]:
        content_width = max(1, math.floor(width * content_height / height))
        return -(-content_width // unit), -(-content_height // unit)

    # The largest height whose canvas has few enough embeddings. More height never needs fewer.
    heights = range(1, height + 1)
    count = bisect_right(heights, most, key=lambda x: math.prod(canvas(x)))
    return canvas(heights[count - 1]) if count else (1, 1)


def fit_size(
    width: int,
    height: int,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    num_counted: int = 1,
) -> tuple[int, int]:
    """Return a width and height in multiples of `unit` whose ratio is close to the image's aspect ratio.

    Args:
        width: The width of the image.
        height: The height of the image.
        unit: The divisor of the returned width and height.
        min_pixels: The minimum of width x height x number of frames.
        max_pixels: The maximum of this product.
        num_frames: The number of frames, which all have this size.
        num_counted: The number of frames in the limits, which is rounded to whole patches.

    Raises:
        ValueError: The aspect ratio of the image is above the maximum.
    """
    check_ratio(width, height)
    sides = [round(side / unit) * unit for side in (width, height)]
    num_pixels = num_frames * width * height
    rounded = num_counted * sides[0] * sides[1]
    if rounded > max_pixels:
        shrink = math.sqrt(num_pixels / max_pixels)
        sides = [math.floor(side / shrink / unit) * unit for side in (width, height)]
    elif rounded < min_pixels:
        grow = math.sqrt(min_pixels / num_pixels)
        sides = [math.ceil(side * grow / unit) * unit for side in (width, height)]
    return max(unit, sides[0]), max(unit, sides[1])


def check_ratio(width: int, height: int, given: tuple[int, int] | None = None) -> None:
    """Raise ValueError if the aspect ratio of an image is above the maximum. The error names the `given` size."""
    if max(width, height) / min(width, height) > MAX_RATIO:
        width, height = given or (width, height)
        raise ValueError(
            f"it has {width} x {height} pixels, and one side may be at most {MAX_RATIO} times as long as the other"
        )
