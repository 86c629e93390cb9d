"""The places of images in a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256

import msgspec
import numpy as np
from PIL import Image

from ...protocol.config.model import ImageProcessorConfig, TileLayout
from ...protocol.errors import ConfigError, ParameterError
from ...protocol.messages import EncoderInput
from ..chat.messages import IMAGE_MARK
from ..tokenizer import Tokenizer
from .processor import Tiles, split_image

_encoder = msgspec.msgpack.Encoder()


class PreparedImage:
    """An image as the model reads it.

    Attributes:
        text: What replaces the image's token in the text of the prompt.
        num_tiles: The number of tiles.
    """

    def __init__(self, tiles: Tiles, text: str) -> None:
        self.text = text
        self.num_tiles = len(tiles.images)
        self._data = [_encoder.encode(tile) for tile in tiles.images]
        self._hashes = [sha256(data).digest() for data in self._data]

    def inputs(self, positions: Sequence[int], num_outputs: int) -> list[EncoderInput]:
        """Return the encoder inputs of the tiles, whose tokens begin at these positions."""
        each = zip(positions, self._hashes, self._data, strict=True)
        return [
            EncoderInput(position, num_outputs, content_hash, num_outputs, data)
            for position, content_hash, data in each
        ]


class PromptImages:
    """Places images in the prompts of one model. It is thread-safe."""

    def __init__(self, config: ImageProcessorConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        token = tokenizer.id_to_token(config.token_id)
        if not token:
            raise ConfigError(
                f"the tokenizer has no token {config.token_id}, which stands for images (image_token_id in config.json)"
            )
        self._token = token
        self._place = re.compile(f"{re.escape(self._token)}|{IMAGE_MARK}")

    def prepare(self, image: Image.Image) -> PreparedImage:
        """Return an image in RGB as the model reads it."""
        tiles = split_image(image, self._config)
        return PreparedImage(tiles, self._text(tiles))

    def expand(self, text: str, images: Sequence[PreparedImage]) -> str:
        """Return the prompt with an image token for each embedding.

        Raises:
            ParameterError: The prompt has more or fewer places than there are images.
        """
        num_places = sum(1 for _ in self._place.finditer(text))
        if num_places != len(images):
            raise ParameterError(
                "messages",
                f"have {len(images)} images, but the prompt has {num_places} image tokens; "
                f"remove {self._token!r} from texts, or use another chat template",
            )
        texts = iter(images)
        return self._place.sub(lambda _: next(texts).text, text)

    def inputs(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> list[EncoderInput]:
        """Return the encoder inputs of a prompt that was made by `expand`.

        Raises:
            ParameterError: The tokens of an image are not where they should be.
        """
        size = self._config.num_outputs
        positions = np.flatnonzero(np.asarray(token_ids) == self._config.token_id)
        starts = positions[::size]
        num_tiles = sum(image.num_tiles for image in images)
        if (
            len(positions) != num_tiles * size
            or (positions[size - 1 :: size] - starts != size - 1).any()
        ):
            raise ParameterError(
                "messages", "have text that the tokenizer joins with an image's token"
            )
        inputs: list[EncoderInput] = []
        for image in images:
            first = len(inputs)
            inputs += image.inputs(starts[first : first + image.num_tiles].tolist(), size)
        return inputs

    def _text(self, tiles: Tiles) -> str:
        embeddings = self._token * self._config.num_outputs
        if self._config.layout is not TileLayout.GRID:
            return f"{self._config.start}{embeddings * len(tiles.images)}{self._config.end}"
        around = "<fake_token_around_image>"
        rows = "".join(
            "".join(
                f"{around}<row_{row}_col_{column}>{embeddings}"
                for column in _from_1(tiles.num_columns)
            )
            + "\n"
            for row in _from_1(tiles.num_rows)
        )
        return f"{rows}{chr(10) if rows else ''}{around}<global-img>{embeddings}{around}"


def _from_1(count: int) -> range:
    return range(1, count + 1)
