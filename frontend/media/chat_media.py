"""The interface for images or audio in conversations, and its implementation for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...protocol.config import EngineConfig
from ...protocol.messages import EncoderInput
from ..client.executor import ThreadExecutor
from ..tokenizer.tokenizer import Tokenizer


class ChatMedia(Protocol):
    """Takes images or audio out of conversations, preprocesses them, and places them in prompts."""

    def start(self) -> None:
        """Start the decoder processes, so that the first file does not have to wait for them."""

    def close(self) -> None:
        """Stop the decoder processes and threads."""

    async def take(self, messages: Sequence[Any], body_size: int) -> tuple[list[Any], list[Any]]:
        """Return the messages with images or audio replaced by marks, and the preprocessed images or audio.

        Raises:
            ParameterError: One of them cannot be read, or they do not fit into the context.
        """

    def wrap(self, given: Any, where: str) -> Any:
        """Return an image or an audio clip that a caller in this process passed, in the form that `prepare` takes."""

    async def prepare(self, found: Sequence[Any]) -> list[Any]:
        """Return preprocessed images or audio.

        Raises:
            ParameterError: One of them cannot be read, or they do not fit into the context.
        """

    def encode(
        self,
        text: str,
        prepared: Sequence[Any],
        encode: Callable[[str], tuple[str, Sequence[int]]],
        /,
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the images or audio inserted, its token ids, and the encoder inputs.

        Raises:
            ParameterError: The prompt has more or fewer places than there are images or audio.
        """


def find_chat_media(
    config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
) -> ChatMedia | None:
    """Return the object for images or audio in conversations; None if the model or the limits allow none."""
    model, limits = config.model, config.frontend
    # A late import, because few models read images or audio.
    if model.images is not None and model.has_tokenizer and limits.max_images:
        from .chat_images import ChatImages

        return ChatImages(config, tokenizer, executor)
    if model.chat_audio is not None and model.has_tokenizer and limits.max_audio_clips:
        from .chat_audio import ChatAudio

        return ChatAudio(config, tokenizer, executor)
    return None
