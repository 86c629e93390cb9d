"""Take images, videos and audio clips out of conversations for a model that reads all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...protocol.config.model import ModelConfig
from ...protocol.config.videos import VideoProcessor
from ...protocol.encoder_inputs.inputs import EncoderInput
from ..chat.messages import VIDEO_PART
from ..tokenizer.tokenizer import Tokenizer
from .audio.clips import PreparedAudio
from .audio.video_sound import with_sound
from .chat_audio import AudioClip, ChatAudio
from .chat_images import ChatImages, ChatVideo
from .chat_media import ChatMedia
from .media_reader import PreparedImage
from .sources.media_options import DEFAULT_OPTIONS, MediaOptions


class MixedMedia:
    """Takes images, videos and audio clips out of conversations, and preprocesses them for the model.

    It has the methods of `ChatMedia`, which raise the same errors. Audio clips follow images and videos in lists.
    """

    def __init__(
        self, images: ChatImages, audio: ChatAudio, model: ModelConfig, tokenizer: Tokenizer
    ) -> None:
        self._images, self._audio = images, audio
        self._videos = model.videos
        self._joined: VideoProcessor | None = None
        self._tokens = "", "", "", ""
        if isinstance(model.videos, VideoProcessor) and (sound := model.videos.sound) is not None:
            assert model.chat_audio is not None, "the model reads no audio"
            self._joined = model.videos
            ids = (
                sound.begin_token_id,
                model.videos.token_id,
                model.chat_audio.token_id,
                sound.end_token_id,
            )
            begin, of_frames, of_sound, end = (tokenizer.id_to_token(id_) or "" for id_ in ids)
            self._tokens = begin, of_frames, of_sound, end

    def start(self) -> None:
        """Start the decoder processes."""
        self._images.start()
        self._audio.start()

    def close(self) -> None:
        """Stop the decoder processes and threads."""
        self._images.close()
        self._audio.close()

    async def take(
        self, messages: Sequence[Any], body_size: int, options: MediaOptions = DEFAULT_OPTIONS
    ) -> tuple[list[Any], list[Any]]:
        """Return the messages with images and audio replaced by marks, and the preprocessed images and audio."""
        taken, found = await self._images.find(messages, body_size, options)
        found = self._images.with_options(found, options)
        found, sounds = await self._read_sounds(found, options)
        images = self._join(await self._images.prepare(found), found, sounds)
        if self._joined is None and any(sounds):
            taken = _after_videos(taken, found, sounds)
        taken, clips = await self._audio.take(taken, body_size)
        return taken, [*images, *clips]

    async def prepare(
        self, found: Sequence[Any], options: MediaOptions = DEFAULT_OPTIONS
    ) -> list[Any]:
        """Return preprocessed images and audio.

        If the sound of videos is read, the first audio clips are those of videos that are given as frames.
        """
        items = [item for item in found if not isinstance(item, AudioClip)]
        clips = await self._audio.prepare([item for item in found if isinstance(item, AudioClip)])
        items = self._images.with_options(items, options)
        items, sounds = await self._read_sounds(items, options)
        images = await self._images.prepare(items)
        if self._joined is not None and self._reads_sound(options):
            for index, item in enumerate(items):
                if isinstance(item, ChatVideo) and sounds[index] is None and clips:
                    sounds[index] = clips.pop(0)
            return [*self._join(images, items, sounds), *clips]
        return [*images, *(sound for sound in sounds if sound is not None), *clips]

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
        own_ids: Sequence[int] = ()

        def encode_images(text: str) -> tuple[str, Sequence[int]]:
            nonlocal own_ids
            text, own_ids, inputs = self._images.encode(text, images, encode)
            placed.extend(inputs)
            if not any(image.sounds for image in images):
                return text, own_ids
            # The tokens of videos' sounds are no places of clips.
            token_ids = np.array(own_ids)
            for item in inputs:
                token_ids[item.position : item.position + item.num_tokens] = -1
            return text, token_ids.tolist()

        text, _, inputs = self._audio.encode(text, clips, encode_images)
        return text, own_ids, sorted([*placed, *inputs], key=lambda item: item.position)

    def _reads_sound(self, options: MediaOptions) -> bool:
        default = self._videos is not None and self._videos.reads_sound
        return default if options.reads_sound is None else options.reads_sound

    async def _read_sounds(
        self, found: Sequence[Any], options: MediaOptions
    ) -> tuple[list[Any], list[PreparedAudio | None]]:
        """Return images and videos, and the sound of each; None for those without sound, and for all by default."""
        items = list(found)
        if not self._reads_sound(options):
            return items, [None] * len(items)
        read: list[PreparedAudio | None] = []
        for index, item in enumerate(items):
            sound = None
            if isinstance(item, ChatVideo):
                # It is downloaded once.
                source: Any = await self._images.urls.fetch(item.source, item.where)
                items[index] = item._replace(source=source)
                sound = await self._audio.prepare_sound(source, item.where)
            read.append(sound)
        return items, read

    def _join(
        self,
        images: Sequence[PreparedImage],
        found: Sequence[Any],
        sounds: Sequence[PreparedAudio | None],
    ) -> list[PreparedImage]:
        """Return images and videos, in which videos have their sound if the model reads it among their frames."""
        config, joined = self._joined, list(images)
        if config is None:
            return joined
        for index, (item, sound) in enumerate(zip(found, sounds, strict=True)):
            if sound is not None:
                fps = item.sampling.fps or config.nominal_fps
                joined[index] = with_sound(images[index], sound, config, fps, self._tokens)
        return joined


def _after_videos(
    messages: Sequence[Any], found: Sequence[Any], sounds: Sequence[PreparedAudio | None]
) -> list[Any]:
    """Return the messages with the sound of each video as an audio clip after it."""
    videos: Iterator[tuple[Any, PreparedAudio | None]] = iter(
        (item, sound)
        for item, sound in zip(found, sounds, strict=True)
        if isinstance(item, ChatVideo)
    )
    changed: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts: list[Any] = []
            for part in content:
                parts.append(part)
                if part is VIDEO_PART:
                    item, sound = next(videos)
                    if sound is not None:
                        parts.append({"type": "audio", "audio": AudioClip(sound, item.where)})
            message = {**message, "content": parts}
        changed.append(message)
    return changed


AnyMedia: TypeAlias = ChatMedia | MixedMedia
