"""Encodes the prompts of a caller in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...protocol.errors import ParameterError
from ...protocol.messages import EncoderInput
from .local_engine import LocalEngine

if TYPE_CHECKING:
    from ..media.chat_images import ChatImages
    from ..media.prompt_images import PreparedImage

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
"""Text, token IDs, or a mapping with `prompt` or `prompt_token_ids`.

A mapping with `prompt` may have `multi_modal_data`: `{"image": image}` with one of Pillow's images, or a list of them,
whose places the text marks with the model's image token.
"""


class EncodedPrompt(NamedTuple):
    """A prompt as text, None if it was given as token IDs, and as token IDs, with its images."""

    text: str | None
    token_ids: list[int]
    encoder_inputs: Sequence[EncoderInput] = ()


class PromptEncoder:
    """Encodes prompts for the model of an engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._images: ChatImages | None = None
        if engine.config.model.images is not None and engine.config.model.has_tokenizer:
            # Imported here, because few models read images.
            from ..media.chat_images import ChatImages

            self._images = ChatImages(engine.config, engine.tokenizer, engine.client.executor)

    def take_images(
        self, conversation: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[PreparedImage]]:
        """Return a conversation without its images, and these."""
        if self._images is None:
            return conversation, ()
        return self._engine.run(self._images.take(conversation, 0))

    def encode_tokens(self, prompt: Prompt, instruction: str = "") -> list[int]:
        """Return the token IDs of a prompt without images, whose text is put after `instruction`.

        Raises:
            ParameterError: The prompt has images.
        """
        encoded = self.encode(prompt, instruction)
        if encoded.encoder_inputs:
            raise ParameterError("multi_modal_data", "is supported only by generate and chat")
        return encoded.token_ids

    def encode(self, prompt: Prompt, instruction: str = "") -> EncodedPrompt:
        """Return a prompt, whose text is put after `instruction`."""
        given: Any = prompt
        images: list[PreparedImage] = []
        if isinstance(prompt, Mapping):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
            images = self._prepare_images(prompt.get("multi_modal_data") or {}, given)
        if isinstance(given, str):
            tokenizer = self._engine.tokenizer
            return self.encode_text(
                instruction + given, images, lambda text: (text, tokenizer.encode(text))
            )
        return EncodedPrompt(None, list(given))

    def _prepare_images(self, data: Mapping[str, Any], prompt: Any) -> list[PreparedImage]:
        """Return the images of a prompt as the model reads them."""
        if not data:
            return []
        if data.keys() != {"image"} or self._images is None or not isinstance(prompt, str):
            raise ParameterError(
                "multi_modal_data",
                f"must be images for a text prompt and a model that reads them, got {sorted(data)}",
            )
        images = data["image"] if isinstance(data["image"], list) else [data["image"]]
        from ..media.chat_images import ChatImage

        wanted = [ChatImage(image, "multi_modal_data") for image in images]
        return self._engine.run(self._images.prepare(wanted))

    def encode_text(
        self,
        text: str,
        images: Sequence[PreparedImage],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> EncodedPrompt:
        """Return a prompt whose text has a place for each image."""
        if self._images is None:
            text, token_ids = encode(text)
            return EncodedPrompt(text, list(token_ids))
        text, token_ids, inputs = self._images.encode(text, images, encode)
        return EncodedPrompt(text, list(token_ids), inputs)
