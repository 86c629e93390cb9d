"""The input audio of a session: decode its formats, and cut it into utterances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Float32Array
from ...http.errors import APIError, bad_request
from ...media.audio.resample import Resampler
from ...media.audio.speech_detector import SpeechDetector
from ..schema.realtime import TurnDetection

PCM: Final = "audio/pcm"


class Format(NamedTuple):
    """A format: its rate in Hz (None if clients choose it), its bytes per sample, and the function that decodes it."""

    rate: int | None
    width: int
    decode: Callable[[bytes], Float32Array]


def _decode_pcm(data: bytes) -> Float32Array:
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def _mu_law() -> npt.NDArray[np.float32]:
    """Return the samples of the 256 codes of G.711's mu-law, float32 [256]."""
    code = ~np.arange(256) & 0xFF
    magnitude = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
    return (np.where(code & 0x80, -magnitude, magnitude) / 32768).astype(np.float32)


def _a_law() -> npt.NDArray[np.float32]:
    """Return the samples of the 256 codes of G.711's A-law, float32 [256]."""
    code = np.arange(256) ^ 0x55
    exponent, mantissa = (code & 0x70) >> 4, (code & 0x0F) << 4
    magnitude = np.where(exponent, mantissa + 0x108 << np.maximum(exponent - 1, 0), mantissa + 8)
    return (np.where(code & 0x80, magnitude, -magnitude) / 32768).astype(np.float32)


_MU_LAW: Final = _mu_law()
_A_LAW: Final = _a_law()

FORMATS: Final = {
    PCM: Format(None, 2, _decode_pcm),
    "audio/pcmu": Format(8_000, 1, lambda data: _MU_LAW[np.frombuffer(data, np.uint8)]),
    "audio/pcma": Format(8_000, 1, lambda data: _A_LAW[np.frombuffer(data, np.uint8)]),
}
"""Name of a format -> the format."""


class Utterance:
    """The audio of one item, as a clip that the transcriber reads.

    Args:
        samples: The samples, float32 [N].
    """

    def __init__(self, samples: Float32Array) -> None:
        self._samples = samples
        self._position = 0

    def read(self, num_samples: int) -> Float32Array:
        """Return the next samples; fewer at the end."""
        start = self._position
        self._position = min(start + num_samples, len(self._samples))
        return self._samples[start : self._position]

    def close(self) -> None:
        """Release the samples."""
        self._samples = np.zeros(0, np.float32)


class Found(NamedTuple):
    """A change that the turn detection found.

    Attributes:
        position: The sample at which speech begins or ends, from the start of the session.
        utterance: The samples of the speech that has ended; None if it begins.
        num_read: The number of these that were read before.
    """

    position: int
    utterance: Float32Array | None
    num_read: int = 0


class InputBuffer:
    """The audio that has arrived and was not committed, at the rate of the model.

    With turn detection, silence is dropped except for the padding before the next speech.

    Args:
        rate: The rate of the model in Hz.
        max_samples: The maximum number of samples.
    """

    def __init__(self, rate: int, max_samples: int) -> None:
        self.rate = rate
        self._max_samples = max_samples
        self._format = FORMATS[PCM]
        self._input_rate = 0
        self._detector: SpeechDetector | None = None
        self._padding = 0
        self._parts: list[Float32Array] = []
        self.num_samples = 0
        """The number of samples in the buffer."""
        self.num_read = 0
        """The number of these that were read."""
        self._num_dropped = self._detected_from = 0

    def configure(self, name: str, rate: int, detection: TurnDetection | None) -> None:
        """Set the format of the audio that arrives, and the turn detection."""
        if (FORMATS[name], rate) != (self._format, self._input_rate):
            self._format, self._input_rate = FORMATS[name], rate
            self._resampler = Resampler(rate, self.rate)
        self._detector = None
        if detection is not None:
            assert detection.threshold is not None
            assert detection.silence_duration_ms is not None
            assert detection.prefix_padding_ms is not None
            silence_s = detection.silence_duration_ms / 1000
            self._detector = SpeechDetector(self.rate, detection.threshold, silence_s)
            self._padding = detection.prefix_padding_ms * self.rate // 1000
            self._detected_from = self._num_dropped + self.num_samples

    def verify_room(self, num_bytes: int) -> int:
        """Return the number of samples that the buffer will have after this many bytes of audio.

        Raises:
            APIError: They are not whole samples, or the buffer would be too long (400).
        """
        width = self._format.width
        if num_bytes % width:
            raise bad_request("audio", f"must have {width} bytes per sample, got {num_bytes} bytes")
        num_samples = self.num_samples + num_bytes // width * self.rate // self._input_rate
        if num_samples > self._max_samples:
            raise APIError(
                400,
                f"the input audio buffer would have {num_samples / self.rate:.1f} s, but must have at most "
                f"{self._max_samples / self.rate:g} s (--max-audio-seconds): commit or clear it",
                param="audio",
                code="input_audio_buffer_full",
            )
        return num_samples

    def append(self, data: bytes) -> list[Found]:
        """Add audio, and return what the turn detection found in it."""
        return self._add(self._resampler.feed(self._format.decode(data)))

    def read_new(self) -> Float32Array:
        """Return the samples of the current utterance that were not read, and leave them in the buffer."""
        if self._detector is not None and not self._detector.is_speech:
            return np.zeros(0, np.float32)
        # Only new samples are copied, because an utterance may be long.
        num_new = self.num_samples - self.num_read
        parts: list[Float32Array] = []
        for part in reversed(self._parts):
            if num_new <= 0:
                break
            parts.append(part[-num_new:])
            num_new -= len(part)
        self.num_read = self.num_samples
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.float32)

    def commit(self) -> Float32Array:
        """Return all samples, and empty the buffer."""
        self._add(self._resampler.feed(np.zeros(0, np.float32), is_end=True), is_end=True)
        self._resampler = Resampler(self._input_rate, self.rate)
        if self._detector is not None:
            self._detector.reset()
        return self._take(self.num_samples)

    def _add(self, samples: Float32Array, *, is_end: bool = False) -> list[Found]:
        """Add samples at the rate of the model. If `is_end`, they are all committed."""
        self._parts.append(samples)
        self.num_samples += len(samples)
        detector = self._detector
        if detector is None:
            return []
        turns = detector.feed(samples)
        if is_end:
            return []
        found: list[Found] = []
        for is_speech, position in turns:
            at = position + self._detected_from
            if is_speech:
                at = max(at - self._padding, self._num_dropped)
                self._take(at - self._num_dropped)
                found.append(Found(at, None))
            else:
                count, num_read = at - self._num_dropped, self.num_read
                found.append(Found(at, self._take(count), min(count, num_read)))
        if not detector.is_speech:
            # The first frames of the next speech may be among these.
            self._take(max(0, self.num_samples - self._padding - self.rate // 10))
        return found

    def _take(self, count: int) -> Float32Array:
        """Remove and return the first samples."""
        if not count:
            return np.zeros(0, np.float32)
        joined = np.concatenate(self._parts)
        self._parts = [joined[count:].copy()]
        self.num_samples -= count
        self.num_read = max(0, self.num_read - count)
        self._num_dropped += count
        return joined[:count]
