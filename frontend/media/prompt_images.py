"""The places of images in a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...protocol.config.images import AnyImageProcessor, FitProcessor, GridProcessor
from ...protocol.errors import ConfigError, ParameterError
from ...protocol.messages import EmbeddingPayload, EncoderInput
from ..chat.messages import MEDIA_MARK
from ..tokenizer import Tokenizer
from .layouts.pixels import Parts, Tile
from .processor import process_image

_encoder = msgspec.msgpack.Encoder()


class PreparedImage:
    """An image as the model reads it.

    Attributes:
        text: What replaces the image's token in the text of the prompt.
        num_outputs: The number of its embeddings, each of which takes the place of a token.
    """

    def __init__(self, parts: Parts, token: str) -> None:
        self.text = "".join(part if isinstance(part, str) else _text(part, token) for part in parts)
        tiles = [part for part in parts if isinstance(part, Tile)]
        self.num_outputs = sum(tile.num_outputs for tile in tiles)
        self.inputs = [_encoder_input(tile) for tile in tiles]


def _text(tile: Tile, token: str) -> str:
    if not tile.row_length:
        return token * tile.num_outputs
    return tile.separator.join([token * tile.row_length] * (tile.num_outputs // tile.row_length))


def _encoder_input(tile: Tile) -> EncoderInput:
    """Return the input of a tile at position 0."""
    data = _encoder.encode(tile.payload)
    num_tokens = tile.num_outputs
    if tile.row_length:
        num_tokens += num_tokens // tile.row_length - 1
    content_hash = sha256(data).digest()
    return EncoderInput(0, num_tokens, content_hash, tile.num_outputs, data, tile.row_length)


class PromptImages:
    """Places images in the prompts of one model. It is thread-safe."""

    def __init__(self, config: AnyImageProcessor, tokenizer: Tokenizer) -> None:
        self._config = config
        token = tokenizer.id_to_token(config.token_id)
        if not token:
            raise ConfigError(
                f"the tokenizer has no token {config.token_id}, which stands for images (image_token_id in config.json)"
            )
        self._token = token
        self._mark = config.mark or token
        self._start_id = tokenizer.token_to_id(config.after_images) if config.after_images else None
        self._place = re.compile(f"{re.escape(self._mark)}|{MEDIA_MARK}")

    def prepare(self, image: Image.Image, num_images: int = 1) -> PreparedImage:
        """Return one of a prompt's images in RGB as the model reads it."""
        return PreparedImage(process_image(image, self._config, num_images), self._token)

    def place_embeddings(self, values: NDArray[np.float32]) -> PreparedImage:
        """Return an image whose embeddings [K, `output_size`] a client sent.

        Raises:
            ValueError: The model's prompts have more than the embeddings of an image in its place.
        """
        config = self._config
        if isinstance(config, FitProcessor | GridProcessor):
            raise ValueError(
                "the prompt of this model depends on the size of an image; send the image"
            )
        rows, columns = values.shape
        payload = EmbeddingPayload(rows, columns, values.astype("<f4").tobytes())
        parts: Parts = [config.start, Tile(payload, len(values)), config.end]
        return PreparedImage(parts, self._token)

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
                f"remove {self._mark!r} from texts, or use another chat template",
            )
        texts = [image.text for image in images]
        if texts:
            texts[-1] += self._config.after_images
            text += self._config.prompt_end
        each = iter(texts)
        return self._place.sub(lambda _: next(each), text)

    def drop_start(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return a prompt without the token before the images that has its place after them."""
        starts = self._start_id is not None and token_ids[:1] == [self._start_id]
        return token_ids[1:] if starts else token_ids

    def inputs(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> list[EncoderInput]:
        """Return the encoder inputs of a prompt that was made by `expand`.

        Raises:
            ParameterError: The tokens of an image are not where they should be.
        """
        positions = np.flatnonzero(np.asarray(token_ids) == self._config.token_id)
        inputs = [item for image in images for item in image.inputs]
        ends = list(accumulate(item.size for item in inputs))
        if [len(positions)] == ends[-1:]:
            starts = [positions[end - item.size] for item, end in zip(inputs, ends, strict=True)]
            lasts = positions[np.asarray(ends) - 1]
            expected = [
                start + item.num_tokens - 1 for start, item in zip(starts, inputs, strict=True)
            ]
            if (lasts == expected).all():
                return [
                    msgspec.structs.replace(item, position=int(start))
                    for item, start in zip(inputs, starts, strict=True)
                ]
        raise ParameterError("messages", "have text that the tokenizer joins with an image's token")
