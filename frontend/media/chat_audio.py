"""Take audio clips out of a conversation, and preprocess them for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy.typing as npt

from ...protocol.arrays import Float32Array
from ...protocol.config import EngineConfig
from ...protocol.config.chat_audio import ChatAudioConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ParameterError
from ..chat.messages import AUDIO_PART
from ..client.executor import ThreadExecutor
from ..http.shown_values import echo
from ..tokenizer.tokenizer import Tokenizer
from .audio.arrays import mono_samples
from .audio.clips import AudioPlaces, PreparedAudio, prepare_clip
from .chat_media import ChatMedia
from .containers import container_format
from .decoding.messages import OpenAudio
from .decoding.processes import MediaProcesses
from .message_parts import replace_parts, verify_count
from .sources.data_urls import read_base64, read_data_url
from .sources.media_options import MediaOptions

_KINDS: Final = ("input_audio", "audio_url", "audio")

Samples: TypeAlias = tuple[npt.NDArray[Any], int]
"""An audio clip from a caller in this process: the samples, shape [N] or [N, channels], and their rate in Hz."""


class AudioClip(NamedTuple):
    """An audio clip of a conversation, and the name of its request field.

    The source is a file in base64, a URL, samples, or a preprocessed clip.
    """

    source: str | Samples | PreparedAudio
    where: str
    is_url: bool = False


def take_audio(messages: Sequence[Any], max_audio_clips: int) -> tuple[list[Any], list[AudioClip]]:
    """Return a copy of the messages with audio clips replaced by `AUDIO_PART`, and a list of the audio clips.

    Raises:
        ParameterError: A part is invalid, or there are too many audio clips.
    """
    clips: list[AudioClip] = []
    taken = replace_parts(messages, lambda part, where: _replace_audio(part, where, clips))
    verify_count("audio clips", len(clips), max_audio_clips)
    return taken, clips


def _replace_audio(part: Any, where: str, clips: list[AudioClip]) -> Any:
    """Append the clip of a part to `clips` and return its mark; return any other part unchanged."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS:
        return part
    value, where = part.get(kind), f"{where}.{kind}"
    if isinstance(value, AudioClip):
        clips.append(value)
        return AUDIO_PART
    if kind == "audio" and isinstance(value, tuple) and len(value) == 2:
        clips.append(AudioClip(value, where))
        return AUDIO_PART
    field = "data" if kind == "input_audio" else "url"
    if isinstance(value, Mapping):
        value, where = value.get(field), f"{where}.{field}"
    if not isinstance(value, str) or not value:
        wanted = "audio in base64" if field == "data" else "the URL of an audio file"
        raise ParameterError(where, f"must be {wanted}, got {echo(value)}")
    clips.append(AudioClip(value, where, is_url=field == "url"))
    return AUDIO_PART


class ChatAudio(ChatMedia):
    """Takes audio clips out of conversations and preprocesses them for the model."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
    ) -> None:
        names = "audio clips", "fewer or shorter audio clips"
        super().__init__(config, executor, MediaProcesses(), names)
        clips = config.model.chat_audio
        assert clips is not None, "the model reads no audio clips"
        self._config: ChatAudioConfig = clips
        self._places = AudioPlaces(clips, tokenizer)
        self._max_clips = config.frontend.max_audio_clips
        self._max_seconds, self._limit = self._find_limit(config)

    def _find_limit(self, config: EngineConfig) -> tuple[float, str]:
        """Return the maximum length of an audio clip in seconds, and a description of the limit that determines it."""
        clips = self._config
        window_s = clips.window_samples / clips.rate
        limits = [
            (config.frontend.max_audio_s, "--max-audio-seconds"),
            (
                self._max_model_len / clips.outputs_per_window * window_s,
                "this model's maximum context length",
            ),
        ]
        if clips.max_windows:
            limits.append((clips.max_windows * window_s, "the length that this model reads"))
        return min(limits)

    def _take(
        self, messages: Sequence[Any], options: MediaOptions
    ) -> tuple[list[Any], list[AudioClip]]:
        return take_audio(messages, self._max_clips)

    def wrap(self, given: Any, where: str) -> AudioClip:
        """Return an audio clip that a caller in this process passed.

        Raises:
            ParameterError: The value is not a pair of samples and their rate.
        """
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], int):
            raise ParameterError(where, f"must have pairs (samples, rate), got {echo(given)}")
        return AudioClip(given, where)

    async def _prepare_one(self, item: AudioClip, found: Sequence[AudioClip]) -> PreparedAudio:
        source: Any = item.source
        if isinstance(source, PreparedAudio):
            return source
        if item.is_url:
            source = await self.urls.read(source, item.where)
        return await self._executor.in_thread(self._prepare, source, item.where)

    def encode(
        self,
        text: str,
        clips: Sequence[PreparedAudio],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the audio clips inserted, its token ids, and the encoder inputs."""
        return self._places.encode(text, clips, encode)

    async def prepare_sound(self, source: Any, where: str) -> PreparedAudio | None:
        """Return the sound of a video, which is a data URL or a file; None if it has none.

        Raises:
            ParameterError: The sound cannot be read.
        """
        if isinstance(source, str):
            source = await self._executor.in_thread(read_data_url, source, where)
        if not isinstance(source, bytes) or container_format(source) is None:
            return None
        samples = await self._executor.in_thread(
            partial(self._decode, source, where, may_be_silent=True)
        )
        if not len(samples):
            return None
        return await self._executor.in_thread(prepare_clip, samples, self._config, where)

    def _prepare(self, source: str | bytes | Samples, where: str) -> PreparedAudio:
        rate = self._config.rate
        if isinstance(source, tuple):
            samples = mono_samples(*source, rate, where, self._max_seconds, self._limit)
        else:
            data = read_base64(source, where) if isinstance(source, str) else source
            samples = self._decode(data, where)
        return prepare_clip(samples, self._config, where)

    def _decode(self, data: bytes, where: str, *, may_be_silent: bool = False) -> Float32Array:
        """Return the samples of a file. A file without an audio track has none if it `may_be_silent`."""
        rate = self._config.rate
        opening = OpenAudio(
            where, rate, self._max_seconds, self._limit, may_be_silent=may_be_silent
        )
        with closing(self._processes.open_audio(data, opening)) as clip:
            # There is at most one sample more than allowed, because the process would have rejected a longer file.
            return clip.read(int(self._max_seconds * rate) + rate)
