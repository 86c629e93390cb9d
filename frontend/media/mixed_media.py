"""Take images and audio clips out of conversations for a model that reads both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...protocol.encoder_inputs.inputs import EncoderInput
from .audio.clips import PreparedAudio
from .chat_audio import AudioClip, ChatAudio
from .chat_images import ChatImages
from .chat_media import ChatMedia


class MixedMedia:
    """Takes images, videos and audio clips out of conversations, and preprocesses them for the model.

    It has the methods of `ChatMedia`, which raise the same errors. Audio clips follow images and videos in lists.
    """

    def __init__(self, images: ChatImages, audio: ChatAudio) -> None:
        self._images, self._audio = images, audio

    def start(self) -> None:
        """Start the decoder processes."""
        self._images.start()
        self._audio.start()

    def close(self) -> None:
        """Stop the decoder processes and threads."""
        self._images.close()
        self._audio.close()

    async def take(self, messages: Sequence[Any], body_size: int) -> tuple[list[Any], list[Any]]:
        """Return the messages with images and audio replaced by marks, and the preprocessed images and audio."""
        taken, images = await self._images.take(messages, body_size)
        taken, clips = await self._audio.take(taken, body_size)
        return taken, [*images, *clips]

    async def prepare(self, found: Sequence[Any]) -> list[Any]:
        """Return preprocessed images and audio."""
        images = [item for item in found if not isinstance(item, AudioClip)]
        clips = [item for item in found if isinstance(item, AudioClip)]
        return [*await self._images.prepare(images), *await self._audio.prepare(clips)]

    def wrap(self, given: Any, where: str) -> Any:
        """Return an image or an audio clip that a caller in this process passed, in the form that `prepare` takes."""
        media: ChatMedia = self._audio if isinstance(given, tuple) else self._images
        return media.wrap(given, where)

    def encode(
        self,
        text: str,
        prepared: Sequence[Any],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of images and audio inserted, its token ids, and the encoder inputs."""
        images = [item for item in prepared if not isinstance(item, PreparedAudio)]
        clips = [item for item in prepared if isinstance(item, PreparedAudio)]
        placed: list[EncoderInput] = []

        def encode_images(text: str) -> tuple[str, Sequence[int]]:
            text, token_ids, inputs = self._images.encode(text, images, encode)
            placed.extend(inputs)
            return text, token_ids

        text, token_ids, inputs = self._audio.encode(text, clips, encode_images)
        return text, token_ids, sorted([*placed, *inputs], key=lambda item: item.position)


AnyMedia: TypeAlias = ChatMedia | MixedMedia
