"""Tiles: resized images in the form that encoders read."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from ....protocol.config.images.settings import ImageProcessorConfig
from ....protocol.encoder_inputs.inputs import EncoderGrid
from ....protocol.encoder_inputs.payloads import EmbeddingPayload, ImagePayload

_MAX_SIDE: Final = 8192
"""Maximum side of an image that is completed to a square, in pixels. The square takes three bytes per pixel."""


class Tile(NamedTuple):
    """The pixels that the encoder reads at a time, and the number of embeddings that it makes of them.

    Attributes:
        num_outputs: The number of embeddings, including those of `before` and `after`.
        row_length: The number of embeddings after which the prompt has `separator`; 0 for no separators.
        grid: The grid of the encoder input.
        before: The texts of the tokens before the image whose embeddings the encoder makes.
        after: The texts of such tokens after the image.
        texts: The texts of the tokens of all embeddings, "" for the model's placeholder; () if all are that.
        is_read: True if cross attention reads the embeddings, so that the image has one token.
    """

    payload: ImagePayload | EmbeddingPayload
    num_outputs: int
    row_length: int = 0
    separator: str = ""
    grid: EncoderGrid | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_read: bool = False


class Video(NamedTuple):
    """The chosen frames of a video, in RGB and of one size.

    `numbers` are the indices of the frames in the video, which has `fps` frames per second and is `seconds` long.
    `sampled_fps` is the number of chosen frames per second.
    """

    frames: list[Image.Image]
    numbers: list[int]
    fps: float
    sampled_fps: float
    seconds: float


Sizes: TypeAlias = tuple[tuple[int, int], ...]
"""The (width, height) pairs to which a frame is resized one after another."""


Parts: TypeAlias = list[str | Tile]
"""The texts and tiles, in their order, that replace an image or a video in a prompt."""


def make_tile(image: Image.Image, config: ImageProcessorConfig) -> Tile:
    """Return an image as a tile."""
    payload = ImagePayload(
        image.width, image.height, image.tobytes(), config.scale, config.mean, config.std
    )
    return Tile(payload, config.num_outputs)


def resize(
    image: Image.Image, width: int, height: int, config: ImageProcessorConfig
) -> Image.Image:
    """Return the image in another size."""
    return image.resize((width, height), Image.Resampling(config.resample))


def interpolate(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the image in another size, each of whose pixels is interpolated from the four nearest ones."""
    pixels = np.asarray(image, np.float32)
    for axis, length in ((0, height), (1, width)):
        count = pixels.shape[axis]
        at = np.maximum((np.arange(length) + 0.5) * (count / length) - 0.5, 0)
        first = at.astype(np.int64)
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        part = (at - first).astype(np.float32).reshape(shape)
        low = pixels.take(first, axis)
        high = pixels.take(np.minimum(first + 1, count - 1), axis)
        pixels = low + part * (high - low)
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))


def in_middle(
    image: Image.Image,
    width: int,
    height: int,
    margin: tuple[int, int, int],
    config: ImageProcessorConfig,
) -> Image.Image:
    """Return the image in the middle of a canvas of a color, as large as the canvas allows.

    Sizes and margins are rounded as in Pillow's `ImageOps.pad`. A side has at least one pixel.
    """
    ratio, wanted = image.width / image.height, width / height
    fitted = width, height
    if ratio > wanted:
        fitted = width, max(round(image.height / image.width * width), 1)
    elif ratio < wanted:
        fitted = max(round(ratio * height), 1), height
    canvas = Image.new("RGB", (width, height), margin)
    place = round((width - fitted[0]) / 2), round((height - fitted[1]) / 2)
    canvas.paste(resize(image, *fitted, config), place)
    return canvas


def on_square(image: Image.Image, config: ImageProcessorConfig) -> Image.Image:
    """Return the image in the middle of a square of the mean color, whose side is the longer one of the image.

    Raises:
        ValueError: The image is too long.
    """
    side = max(image.size)
    if side > _MAX_SIDE:
        raise ValueError(
            f"its longer side may have at most {_MAX_SIDE} pixels, got {side}, because it is completed to a square; "
            "send a smaller one"
        )
    red, green, blue = (int(255 * mean) for mean in config.mean)
    square = Image.new("RGB", (side, side), (red, green, blue))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def with_margin(
    image: Image.Image,
    side: int,
    margin: tuple[int, int, int],
    config: ImageProcessorConfig,
    min_side: int = 1,
) -> Image.Image:
    """Return a square of a color with the image in its middle, resized so that its longer side has `side` pixels.

    The shorter side has at least `min_side` pixels.
    """
    scale = side / max(image.size)
    width, height = (max(min_side, round(length * scale)) for length in image.size)
    square = Image.new("RGB", (side, side), margin)
    square.paste(resize(image, width, height, config), ((side - width) // 2, (side - height) // 2))
    return square
