"""Choose how a model reads the images or audio of conversations."""

from __future__ import annotations

from ...protocol.config import EngineConfig
from ..client.executor import ThreadExecutor
from ..tokenizer.tokenizer import Tokenizer
from .chat_media import ChatMedia


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
