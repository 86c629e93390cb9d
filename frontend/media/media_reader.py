"""Preprocess images and videos as a model needs it, in the process of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...protocol.config.images.processors import AnyImageProcessor
from ...protocol.config.images.sized import PatchesProcessor
from ...protocol.config.videos import AnyVideoProcessor
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.encoder_inputs.payloads import EmbeddingPayload
from ...protocol.errors import ParameterError
from .decode import decode_image, to_rgb
from .frame_sampling import Sampling
from .layouts.embedded import Grid, embedded
from .layouts.frames import fit_frames, frames
from .layouts.pixels import Parts, Sizes, Tile, Video
from .processor import process_image
from .sources.data_urls import read_data_url
from .sources.processor_fields import ProcessorField, with_image_fields, with_video_fields
from .video_files import open_video

MAX_POSITION: Final = 2**31 - 1
"""The end of the tokens that read an image by cross attention, if no other image follows."""

_encoder = msgspec.msgpack.Encoder()


class ReaderConfig(msgspec.Struct, frozen=True):
    """The configuration with which a model reads images and videos.

    Attributes:
        images: The image processor.
        videos: The video processor; None if the model reads no videos.
        token: The text of the placeholder token of images.
        video_token: The text of the placeholder token of videos.
        around: The texts before and after each grid of a video that has a time.
        max_outputs: The maximum number of embeddings of a video.
    """

    images: AnyImageProcessor
    videos: AnyVideoProcessor | None
    token: str
    video_token: str
    around: tuple[str, str]
    max_outputs: int


class PreparedImage(NamedTuple):
    """A preprocessed image or video.

    Attributes:
        text: The text that replaces the image's token in the prompt.
        inputs: The encoder inputs, at position 0.
        is_video: True if it is a video.
        sounds: The encoder inputs of a video's sound among those of its frames. The positions of both are then relative
            to the first token of `text`.
    """

    text: str
    inputs: list[EncoderInput]
    is_video: bool = False
    sounds: Sequence[EncoderInput] = ()

    @property
    def num_outputs(self) -> int:
        """The number of embeddings that replace tokens."""
        return sum(num_places(item) for item in (*self.inputs, *self.sounds))


def num_places(item: EncoderInput) -> int:
    """Return the number of a prompt's image tokens that an input takes."""
    return min(item.num_tokens, item.size)


class MediaReader:
    """Preprocesses images and videos for one model. It is thread-safe."""

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config

    def read_image(
        self,
        source: str | bytes | Image.Image,
        where: str,
        num_images: int,
        fields: Sequence[ProcessorField] = (),
        header: str = "",
    ) -> PreparedImage:
        """Return one of a prompt's images, preprocessed.

        Args:
            source: A data URL, the content of a file, or a Pillow image.
            where: The name of the field in errors.
            num_images: The number of the prompt's images.
            fields: The fields of the request, which replace settings of the processor.
            header: The text that is drawn above the image.

        Raises:
            ParameterError: The image cannot be read, or a field is outside the server's limits.
        """
        config = with_image_fields(self._config.images, fields)
        if header and isinstance(config, PatchesProcessor):
            config = msgspec.structs.replace(config, header=header)
        if isinstance(source, str):
            source = read_data_url(source, where)
        background = config.background
        if isinstance(source, Image.Image):
            image = to_rgb(source, background)
        else:
            image = decode_image(source, where, background)
        try:
            return self.prepare_image(image, num_images, config)
        except ValueError as error:
            raise ParameterError(where, f"cannot be read by this model: {error}") from None

    def read_video(
        self,
        source: str | bytes | Sequence[str | Image.Image],
        sampling: Sampling,
        where: str,
        fields: Sequence[ProcessorField] = (),
    ) -> PreparedImage:
        """Return a preprocessed video. See `open_video` and `read_image` for the arguments.

        Raises:
            ParameterError: The video cannot be read, or a field is outside the server's limits.
        """
        assert self._config.videos is not None, "the model reads no videos"
        config = with_video_fields(self._config.videos, fields)
        max_outputs = self._config.max_outputs

        def fit(width: int, height: int, num_frames: int) -> Sizes:
            return fit_frames(width, height, num_frames, config, max_outputs)

        return self.prepare_video(open_video(source, sampling, where, config, fit), config)

    def prepare_image(
        self, image: Image.Image, num_images: int = 1, config: AnyImageProcessor | None = None
    ) -> PreparedImage:
        """Preprocess and return one of a prompt's images, which must be in RGB.

        `config` is the processor with the settings of a request, by default that of the model.

        Raises:
            ValueError: The model cannot read the image.
        """
        config = config or self._config.images
        parts = process_image(image, config, num_images)
        return _prepared(parts, self._config.token, ends_line=config.ends_line)

    def prepare_video(self, video: Video, config: AnyVideoProcessor | None = None) -> PreparedImage:
        """Return a preprocessed video. See `prepare_image` for `config`."""
        config = config or self._config.videos
        assert config is not None, "the model reads no videos"
        parts = frames(video, config, self._config.around)
        return _prepared(parts, self._config.video_token, is_video=True)

    def place_embeddings(
        self, values: NDArray[np.float32], grid: Grid | None = None
    ) -> PreparedImage:
        """Return an image for embeddings [K, `output_size`] that a client sent, with their grid if it is known.

        Raises:
            ValueError: The model needs a grid, or the grid does not match the embeddings.
        """
        images = self._config.images
        parts = embedded(values, grid, images)
        return _prepared(parts, self._config.token, ends_line=images.ends_line)


def _prepared(
    parts: Parts, token: str, *, is_video: bool = False, ends_line: bool = False
) -> PreparedImage:
    """Return an image or a video. If `ends_line`, a placeholder stands for the line feed after each tile."""
    end = token if ends_line else ""
    text = "".join(part if isinstance(part, str) else _text(part, token) + end for part in parts)
    inputs = [_encoder_input(part) for part in parts if isinstance(part, Tile)]
    return PreparedImage(text, inputs, is_video)


def _text(tile: Tile, token: str) -> str:
    if tile.is_read:
        return token
    if tile.texts:
        return "".join(text or token for text in tile.texts)
    if not tile.row_length:
        num_tokens = tile.num_outputs - len(tile.before) - len(tile.after)
        return "".join((*tile.before, token * num_tokens, *tile.after))
    return tile.separator.join([token * tile.row_length] * (tile.num_outputs // tile.row_length))


def _encoder_input(tile: Tile) -> EncoderInput:
    """Return the encoder input of a tile, at position 0."""
    data = _encoder.encode(tile.payload)
    num_tokens = tile.num_outputs
    if tile.is_read:
        num_tokens = 1
    if tile.row_length:
        num_tokens += num_tokens // tile.row_length - 1
    # Equal frames of a video have equal embeddings but different positions, so positions are not hashed. The grid of
    # pixels follows from their size, but the grid of a client's embeddings does not, so it is hashed.
    has_other_grid = tile.grid is not None and (
        tile.grid.continues or isinstance(tile.payload, EmbeddingPayload)
    )
    content_hash = sha256(data + (_encoder.encode(tile.grid) if has_other_grid else b"")).digest()
    return EncoderInput(
        0,
        num_tokens,
        content_hash,
        tile.num_outputs,
        data,
        tile.row_length,
        tile.grid,
        read_until=MAX_POSITION if tile.is_read else 0,
    )
