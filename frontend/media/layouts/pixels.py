"""Resized images and their pixels."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from PIL import Image

from ....protocol.config.images import ImageProcessorConfig
from ....protocol.messages import EmbeddingPayload, EncoderGrid, ImagePayload


class Tile(NamedTuple):
    """The pixels that a vision tower reads at a time, and the number of embeddings that it makes of them.

    If `row_length` is not 0, `separator` is between each `row_length` embeddings in the prompt. `grid` is that of the
    encoder input.
    """

    payload: ImagePayload | EmbeddingPayload
    num_outputs: int
    row_length: int = 0
    separator: str = ""
    grid: EncoderGrid | None = None


class Video(NamedTuple):
    """The frames of a video that a model reads, in RGB and of one size.

    `numbers` are those of the frames in the video, of which a second has `fps`. `sampled_fps` is how many of the
    frames a second has. The whole video takes `seconds`.
    """

    frames: list[Image.Image]
    numbers: list[int]
    fps: float
    sampled_fps: float
    seconds: float


Sizes: TypeAlias = tuple[tuple[int, int], ...]
"""The widths and heights to which a frame is resized, one after the other."""


Parts: TypeAlias = list[str | Tile]
"""The texts and tiles, in their order, that take the place of an image or a video in a prompt."""


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
