"""Tiles: resized images in the form that encoders read."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from PIL import Image

from ....protocol.config.images import ImageProcessorConfig
from ....protocol.messages import EmbeddingPayload, EncoderGrid, ImagePayload


class Tile(NamedTuple):
    """The pixels that the encoder reads at a time, and the number of embeddings that it makes of them.

    If `row_length` is not 0, the prompt has `separator` between each `row_length` embeddings. `grid` is the grid of the
    encoder input.
    """

    payload: ImagePayload | EmbeddingPayload
    num_outputs: int
    row_length: int = 0
    separator: str = ""
    grid: EncoderGrid | None = None


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
