"""Choose how a model reads the images and audio of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.config import EngineConfig
from ..client.executor import ThreadExecutor
from ..tokenizer.tokenizer import Tokenizer

# Few models read images or audio, so only their frontends import these modules at run time.
if TYPE_CHECKING:
    from .mixed_media import AnyMedia


def find_chat_media(
    config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
) -> AnyMedia | None:
    """Return the reader of the media in conversations; None if the model reads none or the limits allow none."""
    model, limits = config.model, config.frontend
    if not model.has_tokenizer:
        return None
    images = audio = None
    if model.images is not None and limits.max_images:
        from .chat_images import ChatImages

        images = ChatImages(config, tokenizer, executor)
    if model.chat_audio is not None and limits.max_audio_clips:
        from .chat_audio import ChatAudio

        audio = ChatAudio(config, tokenizer, executor)
    if images is not None and audio is not None:
        from .mixed_media import MixedMedia

        return MixedMedia(images, audio, model, tokenizer)
    return images or audio
