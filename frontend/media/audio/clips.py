"""Make encoder inputs of audio clips for chat models, and place them in prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Float32Array, float32_bytes
from ....protocol.checkpoint.config_fields import MAX_INTEGER
from ....protocol.config.audio.samples import WaveSpec
from ....protocol.config.audio.tower import FRAMES_AFTER, AudioTowerSpec
from ....protocol.config.chat_audio import ChatAudioConfig, Framing
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.encoder_inputs.payloads import AudioPayload
from ....protocol.errors import ConfigError, ParameterError, counted
from ...chat.messages import AUDIO_MARK
from ...tokenizer.tokenizer import Tokenizer
from .log_mel import (
    EMPHASIZED,
    HOP,
    LEADING,
    clip_log_mel,
    decibels,
    kaldi_log_mel,
    level,
    log_mel,
    normed_log_mel,
    paired_log_mel,
    stacked_log_mel,
    standardized,
)

_CLIP_FEATURES: Final[dict[Framing, Callable[[Float32Array, int], Float32Array]]] = {
    Framing.PAIRS: paired_log_mel,
    Framing.EMPHASIZED: partial(clip_log_mel, EMPHASIZED),
    Framing.LEADING: partial(clip_log_mel, LEADING),
    Framing.STACKED: stacked_log_mel,
    Framing.NORMED: partial(normed_log_mel, has_dither=False),
    Framing.DECIBELS: decibels,
    Framing.KALDI: kaldi_log_mel,
}
"""Functions of a whole clip and the number of features."""

_VARIANCE_TERM: Final = 1e-5
"""The term that OmniASR adds to the variance of samples."""

_SPEECH_TOKEN: Final = 640
"""The samples of a speech token of Fun-Audio-Chat."""

_encoder = msgspec.msgpack.Encoder()

_MARK_IN_TEXT: Final = re.compile(f"\n{AUDIO_MARK}|{AUDIO_MARK}\n?")
"""The mark of an audio clip, with the line break between it and a text beside it."""


class PreparedAudio:
    """A preprocessed audio clip: its windows, the tokens that its embeddings replace, and its length in seconds."""

    def __init__(self, inputs: list[EncoderInput], seconds: float) -> None:
        self.inputs, self.seconds = inputs, seconds
        self.num_outputs = sum(item.size for item in inputs)


def prepare_clip(samples: Float32Array, config: ChatAudioConfig, where: str) -> PreparedAudio:
    """Return the windows of an audio clip as encoder inputs.

    Args:
        samples: The clip, at the rate of `config`.
        config: The audio processor of the model.
        where: The name of the field in errors.

    Raises:
        ParameterError: The clip is too short for a single embedding.
    """
    seconds = len(samples) / config.rate
    missing = config.min_samples - len(samples)
    if missing > 0:
        samples = np.pad(samples, (0, missing))
    inputs: list[EncoderInput] = []
    tower = config.tower
    most = _max_outputs(samples, config)
    windows = _windows(samples, config) if len(samples) else ()
    for window, (features, num_frames) in enumerate(windows):
        size = min(config.tower.num_outputs(num_frames), most)
        most -= size
        if not size:
            # The rest of the clip is shorter than an embedding.
            continue
        needed = _needed(features, num_frames, size, config)
        inputs.append(_encoder_input(*needed, window * tower.knows_window))
    if not inputs:
        found = counted(len(samples), "sample")
        raise ParameterError(
            where,
            f"is too short: it has {found} at {config.rate} Hz, and about {_fewest_samples(config)} are needed",
        )
    return PreparedAudio(inputs, seconds)


def _fewest_samples(config: ChatAudioConfig) -> int:
    """Return the number of samples of the frames that make one embedding."""
    tower = config.tower
    numbers = range(1, tower.num_frames + 1)
    num_frames = next((number for number in numbers if tower.num_outputs(number)), 1)
    return num_frames * config.window_samples // tower.num_frames


def _max_outputs(samples: Float32Array, config: ChatAudioConfig) -> int:
    """Return the maximum number of embeddings of a clip."""
    tower = config.tower
    if not isinstance(tower, AudioTowerSpec) or tower.groups is None:
        return MAX_INTEGER
    # Fun-Audio-Chat counts the speech tokens of a clip, which take 40 ms each.
    return -(-max(1, len(samples) // _SPEECH_TOKEN) // tower.groups.size)


def _windows(samples: Float32Array, config: ChatAudioConfig) -> Iterator[tuple[Float32Array, int]]:
    """Yield the features of each window [num_mel_bins, frames], and the number of frames in which there is sound.

    Windows of samples without frames are [samples], with those before the window that the tower needs.
    """
    tower = config.tower
    length = tower.num_frames * HOP
    if config.framing is Framing.WINDOWS:
        for start in range(0, len(samples), length):
            part = samples[start : start + length]
            features = log_mel(part, length, tower.num_mel_bins)
            if tower.silence == "cut":
                features = features[:, : len(part) // HOP]
            yield features, -(-len(part) // HOP)
        return
    if isinstance(tower, WaveSpec):
        leveled, hop = level(samples), tower.acoustic.hop
        size, before = tower.part_outputs * hop, tower.outputs_before * hop
        for start in range(0, len(samples), size):
            found = leveled[max(0, start - before) : start + size]
            yield found, len(samples[start : start + size])
        return
    if config.framing is Framing.STANDARD:
        yield standardized(samples, _VARIANCE_TERM), len(samples)
        return
    if (compute := _CLIP_FEATURES.get(config.framing)) is not None:
        features = compute(samples, tower.num_mel_bins)
        if config.norms is not None:
            mean, scale = (np.array(each, np.float32)[:, None] for each in config.norms)
            features = (features - mean) * scale
        if config.framing is Framing.DECIBELS:
            # The last frame of the longest clip is read by no output.
            features = features[:, : tower.num_frames]
        yield features, features.shape[1]
        return
    if config.framing is Framing.SAMPLES:
        size = tower.num_mel_bins
        rows = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
        for start in range(0, len(rows), tower.num_frames):
            part = rows[start : start + tower.num_frames].T
            yield part, part.shape[1]
        return
    num_samples, num_frames = len(samples), -(-len(samples) // HOP)
    if config.framing is Framing.CLIP:
        num_frames = len(samples) // HOP
    elif config.framing is Framing.PADDED:
        num_samples += 2 * HOP
    else:
        num_samples = -(-len(samples) // length) * length
    if not num_frames:
        return
    features = log_mel(samples, num_samples, tower.num_mel_bins)
    if config.framing is Framing.PADDED:
        features = features[:, :num_frames]
    for start in range(0, num_frames, tower.num_frames):
        most = min(num_frames - start, tower.num_frames)
        yield features[:, start : start + tower.num_frames], most


def _needed(
    features: Float32Array, num_frames: int, size: int, config: ChatAudioConfig
) -> tuple[Float32Array, int, int]:
    """Return the features that the tower needs, the number of outputs, and that number or 0 if these are all."""
    tower = config.tower
    if tower.silence in ("dropped", "filling"):
        # The two frames after the sound may still contain some of it. All later ones equal the third.
        return features[:, : num_frames + 3], size, size
    if tower.silence == "cut":
        return features, size, size
    if isinstance(tower, AudioTowerSpec) and tower.frames_after:
        # Beyond the window, the convolutions read zeros.
        num_read = 2 * tower.num_rows(num_frames) + FRAMES_AFTER
        features = np.pad(features, ((0, 0), (0, FRAMES_AFTER)))[:, :num_read]
    return features, size, size * (size < tower.num_outputs(num_frames))


def _encoder_input(
    features: Float32Array, size: int, num_outputs: int, window: int
) -> EncoderInput:
    num_mel_bins, num_frames = features.shape if features.ndim == 2 else (0, len(features))
    payload = AudioPayload(
        num_mel_bins, num_frames, float32_bytes(features), num_outputs=num_outputs, window=window
    )
    data = _encoder.encode(payload)
    return EncoderInput(0, size, sha256(data).digest(), size, data)


class AudioPlaces:
    """The places of audio clips in the prompts of a model.

    Raises:
        ConfigError: The tokenizer lacks the token that represents audio.
    """

    def __init__(self, config: ChatAudioConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token = self._text_of(config.token_id, "audio_token_id")
        self._before = self._after = ""
        self._token_ids = [config.token_id]
        self._num_after = 0
        self._times = config.times
        self._around = config.around
        self._duration_mark = config.duration_mark
        self._ends: tuple[int, int] | None = None
        if (marks := config.marks) is not None and marks.are_unnamed:
            # The placeholder stands for both until the prompt is encoded.
            self._before = self._after = self._token
            self._ends = marks.begin_token_id, marks.end_token_id
        elif marks is not None:
            self._before = marks.margin + self._text_of(marks.begin_token_id, "boa_token_id")
            self._after = self._text_of(marks.end_token_id, "eoa_token_id") + marks.margin
            if marks.has_end_output:
                self._token_ids.append(marks.end_token_id)
                self._num_after = 1
        self._mark = config.mark or self._token
        self._place = re.compile(f"{re.escape(self._mark)}|{AUDIO_MARK}")

    def _text_of(self, token_id: int, field: str) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if not token:
            raise ConfigError(
                f"the tokenizer has no token {token_id}, which represents audio ({field} in config.json)"
            )
        return token

    def encode(
        self,
        text: str,
        clips: Sequence[PreparedAudio],
        encode: Callable[[str], tuple[str, Sequence[int]]],
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the audio clips inserted, its token ids, and the encoder inputs.

        Args:
            text: The prompt, with a token for each clip.
            clips: The audio clips in their order.
            encode: Returns the text and the token ids of a prompt.

        Raises:
            ParameterError: The prompt has more or fewer places than there are audio clips.
        """
        num_places = sum(1 for _ in self._place.finditer(text))
        if num_places > len(clips):
            # As in vLLM, the tokens in a message's text are the places of its clips.
            text = _MARK_IN_TEXT.sub("", text, num_places - len(clips))
            num_places = sum(1 for _ in self._place.finditer(text))
        if num_places != len(clips):
            raise ParameterError(
                "messages",
                f"have {len(clips)} audio clips, but the prompt has {num_places} audio tokens; "
                f"remove {self._mark!r} from texts, or use another chat template",
            )
        if not clips:
            return *encode(text), []
        if self._duration_mark:
            for clip in clips:
                text = text.replace(self._duration_mark, f"{clip.seconds:.2f}", 1)
        each = iter(clips)
        text, token_ids = encode(self._place.sub(lambda place: self._fill(place, each), text))
        if self._ends is not None:
            token_ids = self._with_ends(token_ids, clips, self._ends)
        return text, token_ids, self._place_inputs(token_ids, clips)

    def _with_ends(
        self, token_ids: Sequence[int], clips: Sequence[PreparedAudio], ends: tuple[int, int]
    ) -> Sequence[int]:
        """Return a prompt in which the first and the last placeholder of each clip are its begin and end tokens."""
        replaced = np.array(token_ids, np.int32)
        positions = np.flatnonzero(replaced == self._token_ids[0])
        start = 0
        for clip in clips:
            count = clip.num_outputs + 2
            if start + count > len(positions):
                break
            replaced[positions[start]], replaced[positions[start + count - 1]] = ends
            start += count
        return [int(token) for token in replaced]

    def _fill(self, place: re.Match[str], clips: Iterator[PreparedAudio]) -> str:
        """Return the text that replaces the place of the next clip."""
        before, after = self._around if place[0] == AUDIO_MARK else ("", "")
        return before + self._tokens(next(clips)) + after

    def _tokens(self, clip: PreparedAudio) -> str:
        num_tokens, between = clip.num_outputs - self._num_after, ""
        if (times := self._times) is not None:
            num_times = times.num_times(num_tokens)
            num_tokens -= num_times * times.num_outputs
            for number in range(1, num_times + 1):
                between += self._token * times.num_outputs + str(number * times.seconds)
        return self._before + between + self._token * num_tokens + self._after

    def _place_inputs(
        self, token_ids: Sequence[int], clips: Sequence[PreparedAudio]
    ) -> list[EncoderInput]:
        positions = np.flatnonzero(np.isin(token_ids, self._token_ids))
        inputs = [item for clip in clips for item in clip.inputs]
        if len(positions) == sum(item.size for item in inputs):
            placed: list[EncoderInput] = []
            end = 0
            for item in inputs:
                start, end = end, end + item.size
                position, num_tokens = int(positions[start]), _length(positions[start:end])
                if num_tokens == item.size:
                    placed.append(msgspec.structs.replace(item, position=position))
                elif self._times is not None:
                    between = np.setdiff1d(np.arange(num_tokens), positions[start:end] - position)
                    kept = between.astype("<i4").tobytes()
                    placed.append(
                        msgspec.structs.replace(
                            item, position=position, num_tokens=num_tokens, kept=kept
                        )
                    )
            if len(placed) == len(inputs):
                return placed
        raise ParameterError(
            "messages", "have text that the tokenizer joins with an audio clip's token"
        )


def _length(positions: npt.NDArray[np.int64]) -> int:
    return int(positions[-1] - positions[0]) + 1
