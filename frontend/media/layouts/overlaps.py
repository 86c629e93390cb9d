"""Images that are read as a whole and as a canvas of overlapping tiles (Molmo, Moondream)."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....protocol.config.images.tiles import OverlapsProcessor, WindowsProcessor
from ....protocol.encoder_inputs.payloads import ImagePayload
from .pixels import Parts, Tile, make_tile, resize


def overlaps(image: Image.Image, config: OverlapsProcessor) -> Parts:
    """Return the whole image with the canvas as a larger copy of it, and the tokens of both."""
    side, overlap = config.side, config.side - config.window
    columns, rows = best_tiling(image.width - overlap, image.height - overlap, config)
    width, height = (count * config.window + overlap for count in (columns, rows))
    fit = _padded if config.pads else _stretched
    whole, canvas = (fit(image, *size, config) for size in ((side, side), (width, height)))
    _, whole_id, canvas_id, end_id = config.mark_ids
    ids = [whole_id, *_row_ids(side, side, config, config.ends_whole_rows), end_id]
    ids += [canvas_id, *_row_ids(width, height, config, config.ends_rows), end_id]
    texts = dict(zip(config.mark_ids, config.mark_texts, strict=True)) | {config.token_id: ""}
    payload = msgspec.structs.replace(whole, fine=canvas, token_ids=np.array(ids, "<i4").tobytes())
    return [Tile(payload, len(ids), texts=tuple(texts[each] for each in ids))]


def windows(image: Image.Image, config: WindowsProcessor) -> Parts:
    """Return the whole image with the canvas as a larger copy of it, whose patches are reduced to those of one tile."""
    overlap = config.side - config.window
    columns, rows = _windows(image.width - overlap, image.height - overlap, config)
    width, height = (count * config.window + overlap for count in (columns, rows))
    canvas = make_tile(resize(image, width, height, config), config).payload
    whole = make_tile(resize(image, config.side, config.side, config), config)
    assert isinstance(canvas, ImagePayload)
    return [whole._replace(payload=msgspec.structs.replace(whole.payload, fine=canvas))]


def _windows(width: int, height: int, config: WindowsProcessor) -> tuple[int, int]:
    """Return the columns and rows of tiles, as Moondream's own code chooses them.

    The width and the height do not count the pixels that tiles share, so that they may be 0 or negative.
    """
    step, most = config.window, config.max_tiles
    if min(width, height) <= step:
        return 1, 1
    least = [math.ceil(length / step) for length in (width, height)]
    if math.prod(least) > most:
        share = math.sqrt(most / math.prod(least))
        columns, rows = (max(1, math.floor(count * share)) for count in least)
        return columns, rows
    columns = max(math.floor(math.sqrt(most * width / height)), least[0])
    rows = max(math.floor(math.sqrt(most * height / width)), least[1])
    if columns * rows > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return max(1, columns), max(1, rows)


def _stretched(
    image: Image.Image, width: int, height: int, config: OverlapsProcessor
) -> ImagePayload:
    pixels = _resized(np.asarray(image), width, height)
    return ImagePayload(width, height, pixels, config.scale, config.mean, config.std)


def _padded(image: Image.Image, width: int, height: int, config: OverlapsProcessor) -> ImagePayload:
    """Return the image in the middle of black margins. Its size is computed in float32, as by the model's own code."""
    scale = min(
        np.float32(new) / np.float32(old)
        for new, old in zip((width, height), image.size, strict=True)
    )
    x, y = (max(1, int(np.float32(length) * scale)) for length in image.size)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resize(image, x, y, config), ((width - x) // 2, (height - y) // 2))
    tile = make_tile(canvas, config)
    assert isinstance(tile.payload, ImagePayload)
    return msgspec.structs.replace(tile.payload, original_width=x, original_height=y)


def most_outputs(config: OverlapsProcessor) -> int:
    """Return the number of tokens of the image with the most tokens."""
    side, overlap = config.side, config.side - config.window
    sizes = [
        tuple(count * config.window + overlap for count in tiling)
        for tiling in _tilings(config.max_tiles)
    ]
    most = max(len(_row_ids(width, height, config, config.ends_rows)) for height, width in sizes)
    return most + len(_row_ids(side, side, config, config.ends_whole_rows)) + 4


def _row_ids(width: int, height: int, config: OverlapsProcessor, ends: bool) -> list[int]:
    columns, rows = (-(-length // config.unit) for length in (width, height))
    return ([config.token_id] * columns + [config.mark_ids[0]] * ends) * rows


def best_tiling(width: int, height: int, config: OverlapsProcessor) -> tuple[int, int]:
    """Return the columns and rows of tiles that enlarge an image least, or else shrink it least.

    The width and the height do not count the pixels that tiles share, so that they may be 0 or negative. Numbers are
    compared in float32, as in transformers.
    """
    tilings = _tilings(config.max_tiles)
    sizes = np.array(tilings, np.float32) * np.float32(config.window)
    with np.errstate(divide="ignore"):
        scales = (sizes / np.array([height, width], np.float32)).min(1)
    enlarging = scales >= 1
    best = scales.argmax() if not enlarging.any() else np.where(enlarging, scales, 1e10).argmin()
    rows, columns = tilings[int(best)]
    return columns, rows


def _tilings(max_tiles: int) -> list[tuple[int, int]]:
    """Return all rows and columns of up to `max_tiles` tiles, those with fewer tiles and fewer rows first."""
    counts = range(1, max_tiles + 1)
    found = [pair for pair in itertools.product(counts, counts) if pair[0] * pair[1] <= max_tiles]
    return sorted(found, key=lambda pair: (pair[0] * pair[1], pair[0]))


def _resized(pixels: NDArray[np.uint8], width: int, height: int) -> bytes:
    """Return pixels [height, width, 3] in another size, each a mean of the four that are nearest in the original."""
    rows, columns = (
        _neighbors(old, new) for old, new in zip(pixels.shape, (height, width), strict=False)
    )
    top, bottom = (
        sum(
            pixels[at][:, columns_at].astype(np.float32) * share[:, None]
            for columns_at, share in columns
        )
        for at, _ in rows
    )
    found = top * rows[0][1][:, None, None] + bottom * rows[1][1][:, None, None]
    return found.round().clip(0, 255).astype(np.uint8).tobytes()


def _neighbors(old: int, new: int) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Return the indices of both neighbors of each of `new` places among `old` ones, and their shares."""
    scale = np.float32(old) / np.float32(new)
    at = np.maximum(
        (np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0
    )
    first = np.minimum(at.astype(np.int64), old - 1)
    share = (at - first).astype(np.float32)
    return [(first, 1 - share), (np.minimum(first + 1, old - 1), share)]
