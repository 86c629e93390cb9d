"""Take sounds out of a conversation, and preprocess them for the model."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.arrays import Float32Array, float32_bytes
from ...protocol.checkpoint.audio_tower import FRAMES_AFTER
from ...protocol.config import EngineConfig
from ...protocol.config.sounds import SoundProcessorConfig
from ...protocol.errors import ConfigError, ParameterError
from ...protocol.messages import AudioPayload, EncoderInput
from ..chat.messages import AUDIO_PART, MEDIA_MARK
from ..client.executor import ThreadExecutor
from ..http.shown_values import echo
from ..tokenizer.tokenizer import Tokenizer
from .audio.arrays import mono_samples
from .audio.log_mel import HOP, RATE, log_mel
from .data_urls import is_data_url, read_data_url
from .decoding.limits import MAX_PROCESSES
from .decoding.messages import OpenSound
from .decoding.processes import MediaProcesses
from .downloads import Downloader
from .message_parts import replace_parts, verify_count

_KINDS: Final = ("input_audio", "audio_url", "audio")

Samples: TypeAlias = tuple[npt.NDArray[Any], int]
"""A sound from a caller in this process: the samples, shape [N] or [N, channels], and their rate in Hz."""

_encoder = msgspec.msgpack.Encoder()


class ChatSound(NamedTuple):
    """A sound of a conversation (a file in base64, a URL, or samples), and the name of its request field."""

    source: str | Samples
    where: str
    is_url: bool = False


class PreparedSound:
    """A preprocessed sound: its windows, and the tokens that its embeddings replace."""

    def __init__(self, inputs: list[EncoderInput]) -> None:
        self.inputs = inputs
        self.num_outputs = sum(item.size for item in inputs)


def take_sounds(messages: Sequence[Any], max_sounds: int) -> tuple[list[Any], list[ChatSound]]:
    """Return a copy of the messages with sounds replaced by `AUDIO_PART`, and a list of the sounds.

    Raises:
        ParameterError: A part is invalid, or there are too many sounds.
    """
    sounds: list[ChatSound] = []
    taken = replace_parts(messages, lambda part, where: _replace_sound(part, where, sounds))
    verify_count("sounds", len(sounds), max_sounds)
    return taken, sounds


def _replace_sound(part: Any, where: str, sounds: list[ChatSound]) -> Any:
    """Append the sound of a part to `sounds` and return its mark; return any other part unchanged."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS:
        return part
    value, where = part.get(kind), f"{where}.{kind}"
    if kind == "audio" and isinstance(value, tuple) and len(value) == 2:
        sounds.append(ChatSound(value, where))
        return AUDIO_PART
    field = "data" if kind == "input_audio" else "url"
    if isinstance(value, Mapping):
        value, where = value.get(field), f"{where}.{field}"
    if not isinstance(value, str) or not value:
        wanted = "audio in base64" if field == "data" else "the URL of an audio file"
        raise ParameterError(where, f"must be {wanted}, got {echo(value)}")
    sounds.append(ChatSound(value, where, is_url=field == "url"))
    return AUDIO_PART


class ChatSounds:
    """Takes sounds out of conversations and preprocesses them for the model.

    Files are decoded in separate processes, so that a crash of a decoder does not end this one.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
    ) -> None:
        sounds = config.model.sounds
        assert sounds is not None, "the model reads no sounds"
        self._config: SoundProcessorConfig = sounds
        token = tokenizer.id_to_token(sounds.token_id)
        if not token:
            raise ConfigError(
                f"the tokenizer has no token {sounds.token_id}, which represents audio (audio_token_id in "
                "config.json)"
            )
        self._token = token
        self._place = re.compile(f"{re.escape(token)}|{MEDIA_MARK}")
        self._max_sounds = config.frontend.max_sounds
        self._max_model_len = config.model.max_model_len
        self._max_seconds, self._limit = self._find_limit(config)
        self._processes = MediaProcesses()
        self._executor = executor.create_separate(MAX_PROCESSES)
        self._downloader: Downloader | None = None
        if config.frontend.allowed_media_domains:
            self._downloader = Downloader(config.frontend.allowed_media_domains)
            # A slow host must not delay sounds that have arrived already.
            self._downloads = executor.create_separate()

    def start(self) -> None:
        """Start the decoder processes, so that the first file does not have to wait for them."""
        self._processes.start()

    def close(self) -> None:
        """Stop the decoder processes and threads."""
        self._processes.close()
        self._executor.close()
        if self._downloader is not None:
            self._downloads.close()

    def _find_limit(self, config: EngineConfig) -> tuple[float, str]:
        """Return the maximum length of a sound in seconds, and a description of the limit that determines it."""
        sounds = self._config
        window_s = sounds.window_frames * HOP / RATE
        limits = [
            (config.frontend.max_audio_s, "--max-audio-seconds"),
            (
                self._max_model_len / sounds.outputs_per_window * window_s,
                "this model's maximum context length",
            ),
        ]
        if sounds.max_windows:
            limits.append((sounds.max_windows * window_s, "the length that this model reads"))
        return min(limits)

    async def take(
        self, messages: Sequence[Any], body_size: int
    ) -> tuple[list[Any], list[PreparedSound]]:
        """Return the messages with sounds replaced by `AUDIO_PART`, and the prepared sounds.

        Args:
            messages: The conversation.
            body_size: The size of the request in bytes.

        Raises:
            ParameterError: A sound cannot be read, or the sounds do not fit into the context.
        """
        taken, sounds = await self._executor.run(body_size, take_sounds, messages, self._max_sounds)
        return taken, await self.prepare(sounds)

    def wrap(self, given: Any, where: str) -> ChatSound:
        """Return a sound that a caller in this process passed.

        Raises:
            ParameterError: The value is not a pair of samples and their rate.
        """
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], int):
            raise ParameterError(where, f"must have pairs (samples, rate), got {echo(given)}")
        return ChatSound(given, where)

    async def prepare(self, sounds: Sequence[ChatSound]) -> list[PreparedSound]:
        """Return preprocessed sounds.

        Raises:
            ParameterError: A sound cannot be read, or the sounds do not fit into the context.
        """
        prepared: list[PreparedSound] = []
        num_outputs = 0
        for sound in sounds:
            source: str | bytes | Samples = sound.source
            if sound.is_url and isinstance(source, str):
                if not is_data_url(source) and self._downloader is not None:
                    download = self._downloader.download
                    source = await self._downloads.in_thread(download, source, sound.where)
                else:
                    source = await self._executor.in_thread(read_data_url, source, sound.where)
            prepared.append(await self._executor.in_thread(self._prepare, source, sound.where))
            num_outputs += prepared[-1].num_outputs
            if num_outputs > self._max_model_len:
                raise ParameterError(
                    sound.where.split("[")[0],
                    f"have sounds with more tokens than the {self._max_model_len} of this model's maximum "
                    "context length; send fewer or shorter sounds",
                )
        return prepared

    def encode(
        self,
        text: str,
        sounds: Sequence[PreparedSound],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the sounds inserted, its token ids, and the encoder inputs.

        Args:
            text: The prompt, with a token for each sound.
            sounds: The sounds in their order.
            encode: Returns the text and the token ids of a prompt.

        Raises:
            ParameterError: The prompt has more or fewer places than there are sounds.
        """
        num_places = sum(1 for _ in self._place.finditer(text))
        if num_places != len(sounds):
            raise ParameterError(
                "messages",
                f"have {len(sounds)} sounds, but the prompt has {num_places} audio tokens; "
                f"remove {self._token!r} from texts, or use another chat template",
            )
        if not sounds:
            return *encode(text), []
        each = iter(sounds)
        text, token_ids = encode(
            self._place.sub(lambda _: self._token * next(each).num_outputs, text)
        )
        return text, token_ids, self._place_inputs(token_ids, sounds)

    def _place_inputs(
        self, token_ids: Sequence[int], sounds: Sequence[PreparedSound]
    ) -> list[EncoderInput]:
        """Return the encoder inputs at the positions of their tokens.

        Raises:
            ParameterError: The tokens of a sound are not at the expected positions.
        """
        positions = np.flatnonzero(np.asarray(token_ids) == self._config.token_id)
        inputs = [item for sound in sounds for item in sound.inputs]
        if len(positions) == sum(item.size for item in inputs):
            placed: list[EncoderInput] = []
            end = 0
            for item in inputs:
                start, end = end, end + item.size
                if positions[end - 1] - positions[start] == item.size - 1:
                    position = int(positions[start])
                    placed.append(msgspec.structs.replace(item, position=position))
            if len(placed) == len(inputs):
                return placed
        raise ParameterError("messages", "have text that the tokenizer joins with a sound's token")

    def _prepare(self, source: str | bytes | Samples, where: str) -> PreparedSound:
        if isinstance(source, tuple):
            samples = mono_samples(*source, RATE, where, self._max_seconds, self._limit)
        else:
            data = _decode_base64(source, where) if isinstance(source, str) else source
            opening = OpenSound(where, RATE, self._max_seconds, self._limit)
            with closing(self._processes.open_sound(data, opening)) as sound:
                # There is at most one sample more than allowed, because the process would have rejected a longer file.
                samples = sound.read(int(self._max_seconds * RATE) + RATE)
        return PreparedSound(self._split(samples, where))

    def _split(self, samples: Float32Array, where: str) -> list[EncoderInput]:
        """Return the windows of a sound as encoder inputs.

        Raises:
            ParameterError: The sound is too short for a single embedding.
        """
        config = self._config
        window = config.window_frames
        num_frames = -(-len(samples) // HOP)
        num_windows = -(-num_frames // window)
        features = log_mel(samples, num_windows * window * HOP, config.num_mel_bins)
        inputs: list[EncoderInput] = []
        for start in range(0, num_frames, window):
            size = config.outputs_per_window
            part = features[:, start : start + window]
            if not config.is_filled:
                num_rows = (min(num_frames - start, window) + 1) // 2
                size = 2 * num_rows // config.frames_per_output
                # Beyond the window, the convolutions read zeros.
                part = np.pad(part, ((0, 0), (0, FRAMES_AFTER)))[:, : 2 * num_rows + FRAMES_AFTER]
            if not size:
                raise ParameterError(
                    where, f"is too short: it has {len(samples)} samples at {RATE} Hz"
                )
            inputs.append(_encoder_input(part, size))
        return inputs


def _encoder_input(features: Float32Array, size: int) -> EncoderInput:
    num_mel_bins, num_frames = features.shape
    payload = AudioPayload(num_mel_bins, num_frames, float32_bytes(features))
    data = _encoder.encode(payload)
    return EncoderInput(0, size, sha256(data).digest(), size, data)


def _decode_base64(data: str, where: str) -> bytes:
    try:
        # Base64 may contain white space, but no other characters.
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParameterError(where, f"is not valid base64: {error}") from None
