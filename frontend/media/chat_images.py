"""Takes the images out of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...protocol.config import EngineConfig
from ...protocol.errors import ParameterError
from ...protocol.messages import EncoderInput
from ..chat.messages import IMAGE_PART
from ..client.executor import ThreadExecutor
from ..http.shown_values import echo
from ..tokenizer import Tokenizer
from .data_urls import is_data_url, read_data_url
from .decode import decode_image, to_rgb
from .downloads import Downloader
from .embeddings import check_embeddings, read_embeddings
from .prompt_images import PreparedImage, PromptImages

_EMBEDDINGS: Final = "image_embeds"
_KINDS: Final = ("image_url", "input_image", "image_pil", "image", _EMBEDDINGS)


class ChatImage(NamedTuple):
    """An image of a conversation: a URL, Pillow's image or an array from a caller in this process, or embeddings."""

    source: str | Image.Image | NDArray[Any]
    where: str
    is_embedded: bool = False


def take_images(messages: Sequence[Any], max_images: int) -> tuple[list[Any], list[ChatImage]]:
    """Return a copy of the messages with `IMAGE_PART` in place of images, and these, in their order.

    Raises:
        ParameterError: A part is invalid, or there are too many images.
    """
    images: list[ChatImage] = []
    taken: list[Any] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(map(_is_image, content)):
            parts = [
                _take(part, f"messages[{i}].content[{j}]", images) for j, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        taken.append(message)
    if len(images) > max_images:
        raise ParameterError(
            "messages",
            f"have {len(images)} images, but at most {max_images} are allowed (--limit-mm-per-prompt)",
        )
    return taken, images


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _take(part: Any, where: str, images: list[ChatImage]) -> Any:
    """Return what replaces the part, and append its image."""
    if not _is_image(part):
        return part
    kind = part["type"]
    value = part.get(kind, part.get("image_url"))
    where = f"{where}.{kind}"
    if isinstance(value, Mapping):
        value, where = value.get("url"), f"{where}.url"
    if kind == _EMBEDDINGS:
        if not isinstance(value, str | np.ndarray):
            raise ParameterError(where, f"must be a file in base64, got {echo(value)}")
        images.append(ChatImage(value, where, is_embedded=True))
        return IMAGE_PART
    if not isinstance(value, str | Image.Image) or not value:
        raise ParameterError(where, f"must be the URL of an image, got {echo(value)}")
    images.append(ChatImage(value, where))
    return IMAGE_PART


class ChatImages:
    """Takes images out of conversations and prepares them for the model, in threads of their own."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
    ) -> None:
        assert config.model.images is not None, "the model reads no images"
        self._places = PromptImages(config.model.images, tokenizer)
        self._max_images = config.frontend.max_images
        self._reads_embeddings = config.frontend.enable_mm_embeds
        self._size = config.model.images.output_size
        self._max_model_len = config.model.max_model_len
        self._executor = executor.create_separate()
        self._downloader: Downloader | None = None
        if config.frontend.allowed_media_domains:
            self._downloader = Downloader(config.frontend.allowed_media_domains)
            # A slow host must not delay images that are here already.
            self._downloads = executor.create_separate()

    async def take(
        self, messages: Sequence[Any], body_size: int
    ) -> tuple[list[Any], list[PreparedImage]]:
        """Return the messages with `IMAGE_PART` in place of images, and the prepared images.

        Args:
            messages: The conversation.
            body_size: The size of the request in bytes.

        Raises:
            ParameterError: An image cannot be read, or they do not fit into the context.
        """
        taken, images = await self._executor.run(body_size, take_images, messages, self._max_images)
        return taken, await self.prepare(images)

    def wrap(self, given: str | Image.Image, where: str) -> ChatImage:
        """Return an image of a caller in this process."""
        return ChatImage(given, where)

    async def prepare(self, images: Sequence[ChatImage]) -> list[PreparedImage]:
        """Return images as the model reads them.

        Raises:
            ParameterError: An image cannot be read, or they do not fit into the context.
        """
        prepared: list[PreparedImage] = []
        num_outputs = 0
        for image in images:
            prepared.append(await self._prepare_one(image, len(images)))
            num_outputs += prepared[-1].num_outputs
            if num_outputs > self._max_model_len:
                raise ParameterError(
                    image.where.split("[")[0],
                    f"have images with more tokens than the {self._max_model_len} of this model's maximum context "
                    "length; send fewer or smaller images",
                )
        return prepared

    def encode(
        self,
        text: str,
        images: Sequence[PreparedImage],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with room for the images, its token ids and the encoder inputs.

        Args:
            text: The prompt, with a token for each image.
            images: The images in their order.
            encode: Returns the text and the token ids of a prompt.

        Raises:
            ParameterError: The prompt has more or fewer places than there are images.
        """
        if not images:
            return *encode(text), []
        text, token_ids = encode(self._places.expand(text, images))
        token_ids = self._places.drop_start(token_ids)
        return text, token_ids, self._places.inputs(token_ids, images)

    async def _prepare_one(self, image: ChatImage, num_images: int) -> PreparedImage:
        source, where = image.source, image.where
        if image.is_embedded or isinstance(source, np.ndarray):
            return await self._executor.in_thread(self._place_embeddings, source, where)
        if isinstance(source, str) and not is_data_url(source) and self._downloader is not None:
            content = await self._downloads.in_thread(self._downloader.download, source, where)
            return await self._executor.in_thread(self._prepare, content, where, num_images)
        return await self._executor.in_thread(self._prepare, source, where, num_images)

    def _place_embeddings(self, source: str | NDArray[Any], where: str) -> PreparedImage:
        if not self._reads_embeddings:
            raise ParameterError(
                where, "is not accepted by this server, which runs without --enable-mm-embeds"
            )
        values = read_embeddings(source, where) if isinstance(source, str) else source
        checked = check_embeddings(values, where, self._size)
        try:
            return self._places.place_embeddings(checked)
        except ValueError as error:
            raise ParameterError(where, f"cannot be read by this model: {error}") from None

    def _prepare(
        self, source: str | bytes | Image.Image, where: str, num_images: int
    ) -> PreparedImage:
        if isinstance(source, str):
            source = read_data_url(source, where)
        image = to_rgb(source) if isinstance(source, Image.Image) else decode_image(source, where)
        try:
            return self._places.prepare(image, num_images)
        except ValueError as error:
            raise ParameterError(where, f"cannot be read by this model: {error}") from None
