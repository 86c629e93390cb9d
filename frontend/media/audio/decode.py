"""Decode audio files of requests, which are untrusted."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any, Final, Protocol

import numpy as np

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError
from .containers import ContainerFile, container_format, has_audio
from .resample import MAX_RATE, MIN_RATE, Resampler

MAX_CHANNELS: Final = 16

_BLOCK: Final = 1 << 16
"""Number of samples, of all channels together, that are decoded at once."""

_FORMATS: Final = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "MP3", "OGG")
"""The accepted formats, by libsndfile's names."""

_NAMES: Final = "wav, flac, mp3, ogg (Vorbis or Opus), m4a, mp4, aac, webm, mkv, aiff, au, caf"

_UNKNOWN_SIZE: Final = 0x7FFF0000
"""Programs that write WAV to a pipe do not know its size. They put at least this many bytes into the header, or 0."""

_UNKNOWN_LENGTH: Final = 1 << 60

_INDEXES: Final = (b"Xing", b"Info")
_INDEX_BYTES: Final = 1 << 16
"""The first frame of an MP3 file may be an index with the number of frames.

It is searched for after tags of this size.
"""


class _Source(Protocol):
    """An open audio file.

    Attributes:
        rate: The sample rate in Hz.
        num_channels: The number of channels.
        length: The number of frames if it is known before decoding, otherwise -1.
        min_length: The number of frames below which the file counts as truncated.
    """

    rate: int
    num_channels: int
    length: int
    min_length: int

    def read(self, num_frames: int) -> Float32Array:
        """Return about `num_frames` frames, [frames, channels] in [-1, 1]; an empty array at the end."""


class AudioReader:
    """Reads an audio file in pieces, as mono samples of one rate. Only the encoded file is held in memory.

    Args:
        data: The content of the file.
        where: The name of the field in errors.
        rate: The rate of the samples in Hz.
        max_seconds: The maximum length in seconds.
        limit: A description of the limit that determines `max_seconds`.
        may_be_silent: True if a file without an audio track has no samples.

    Raises:
        ParameterError: The file is empty, of an unknown format, damaged, or too long.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        rate: int,
        max_seconds: float,
        limit: str = "--max-audio-seconds",
        *,
        may_be_silent: bool = False,
    ) -> None:
        if not data:
            raise ParameterError(where, "must be an audio file, got an empty one")
        self._where = where
        self._max_seconds, self._limit = max_seconds, limit
        data = _with_length(data, where)
        self._is_ended = may_be_silent and not has_audio(data)
        if self._is_ended:
            return
        self._source = _open(data, where)
        found = self._source.rate
        if not MIN_RATE <= found <= MAX_RATE:
            raise ParameterError(
                where,
                f"has a sample rate of {found} Hz, but it must be from {MIN_RATE} to {MAX_RATE}",
            )
        if self._source.num_channels > MAX_CHANNELS:
            raise ParameterError(
                where,
                f"has {self._source.num_channels} channels, but at most {MAX_CHANNELS} are allowed",
            )
        self._verify_seconds(self._source.length)
        self._resampler = Resampler(found, rate)
        self._num_decoded = 0

    def read(self, num_samples: int) -> Float32Array:
        """Return at least `num_samples` of the next samples, float32 [N]; fewer only at the end.

        Raises:
            ParameterError: The file is damaged, or longer than its header says and than allowed.
        """
        parts: list[Float32Array] = []
        num_read = 0
        while num_read < num_samples and not self._is_ended:
            part = self._read_block()
            parts.append(part)
            num_read += len(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _read_block(self) -> Float32Array:
        source = self._source
        try:
            frames = source.read(max(1, _BLOCK // source.num_channels))
        except MemoryError:
            raise
        # For damaged files, decoders raise many kinds of errors.
        except Exception as error:
            raise _unreadable(self._where, error) from None
        self._num_decoded += len(frames)
        if len(frames):
            self._verify_seconds(self._num_decoded)
            # NaNs of damaged files would spread to all features of their window.
            mono = np.nan_to_num(frames.mean(axis=1), posinf=0, neginf=0).clip(-1, 1)
            return self._resampler.feed(mono)
        self._is_ended = True
        if not self._num_decoded:
            raise ParameterError(self._where, "must have at least one sample, got 0")
        if self._num_decoded < source.min_length:
            raise _truncated(
                self._where, f"{source.length} samples", f"{self._num_decoded} can be decoded"
            )
        return self._resampler.feed(np.zeros(0, np.float32), is_end=True)

    def _verify_seconds(self, num_frames: int) -> None:
        seconds = num_frames / self._source.rate
        if seconds > self._max_seconds:
            raise ParameterError(
                self._where,
                f"is {seconds:.1f} s long, but at most {self._max_seconds:g} s are allowed ({self._limit}); "
                "send it in parts",
            )


def _with_length(data: bytes, where: str) -> bytes:
    """Return a file; a WAV file whose writer did not know its length gets a header that says so.

    Raises:
        ParameterError: A WAV file is shorter than its header says. Decoders accept such files silently.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return data
    riff_size = struct.unpack_from("<I", data, 4)[0]
    start = 12
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        start += 8
        if name == b"data":
            is_open = riff_size + 8 <= start or riff_size >= _UNKNOWN_SIZE
            if not size and is_open and start < len(data):
                return data[: start - 4] + struct.pack("<I", 0xFFFF_FFFF) + data[start:]
            if len(data) < start + size < start + _UNKNOWN_SIZE:
                raise _truncated(where, f"{size} bytes of audio", f"{len(data) - start} follow")
            return data
        start += size + size % 2
    return data


def _open(data: bytes, where: str) -> _Source:
    """Open a file with PyAV or libsndfile, or with Python's wave module if libsndfile is not installed."""
    if container_format(data) is not None:
        try:
            return ContainerFile(data, where)
        except (ParameterError, MemoryError):
            raise
        # For damaged files, PyAV raises many kinds of errors.
        except Exception as error:
            raise _unreadable(where, error) from None
    try:
        # A late import, because the package is optional.
        import soundfile
    except (ImportError, OSError):
        # OSError: the package is installed without its library.
        return _open_wave(data, where)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
        if file.format not in _FORMATS:
            raise ParameterError(
                where, f"is of the format {file.format}, but must be one of {_NAMES}"
            )
        return _SoundFile(file, has_index=any(mark in data[:_INDEX_BYTES] for mark in _INDEXES))
    except (ParameterError, MemoryError):
        raise
    except Exception as error:
        raise _unreadable(where, error) from None


def _open_wave(data: bytes, where: str) -> _Source:
    if data[:4] != b"RIFF":
        raise ParameterError(
            where,
            "is not a WAV file, and this server reads only WAV files: install the extra "
            "engine-serve[media] for other formats",
        )
    try:
        return _WaveFile(wave.open(io.BytesIO(data)))
    except Exception as error:
        raise ParameterError(
            where,
            f"is not a WAV file that can be read without the extra engine-serve[media]: {_reason(error)}",
        ) from None


class _SoundFile:
    """A file that libsndfile reads."""

    def __init__(self, file: Any, *, has_index: bool) -> None:
        self._file = file
        # Otherwise soundfile seeks after each read, and MP3 decoders lose data of the previous frames.
        file.seekable = lambda: False
        self.rate: int = file.samplerate
        self.num_channels: int = file.channels
        self.length: int = file.frames if file.frames < _UNKNOWN_LENGTH else -1
        # The index of an MP3 file may differ from the length by the encoder's delay.
        share = {"FLAC": 1.0, "MP3": 0.9 if has_index else 0.0}.get(file.format, 0.0)
        self.min_length = int(share * self.length)

    def read(self, num_frames: int) -> Float32Array:
        frames: Float32Array = self._file.read(num_frames, dtype="float32", always_2d=True)
        return frames


class _WaveFile:
    """A WAV file that Python reads: PCM of 8, 16, 24 or 32 bits."""

    def __init__(self, file: wave.Wave_read) -> None:
        self._file = file
        self.rate = file.getframerate()
        self.num_channels = file.getnchannels()
        self.length = file.getnframes()
        self.min_length = 0
        self._width = file.getsampwidth()

    def read(self, num_frames: int) -> Float32Array:
        data = self._file.readframes(num_frames)
        frames = np.frombuffer(data[: len(data) // self._frame_bytes * self._frame_bytes], np.uint8)
        frames = frames.reshape(-1, self.num_channels, self._width)
        if self._width == 1:
            # Only 8-bit samples are unsigned.
            narrow: Float32Array = frames[..., 0].astype(np.float32) / np.float32(128) - np.float32(
                1
            )
            return narrow
        wide = np.zeros((*frames.shape[:2], 4), np.uint8)
        wide[..., 4 - self._width :] = frames
        samples: Float32Array = wide.view("<i4")[..., 0].astype(np.float32) / np.float32(2**31)
        return samples

    @property
    def _frame_bytes(self) -> int:
        return self._width * self.num_channels


def _unreadable(where: str, error: Exception) -> ParameterError:
    return ParameterError(
        where,
        f"is not an audio file that can be read: {_reason(error)}; send a whole one of {_NAMES}",
    )


def _reason(error: Exception) -> str:
    # libsndfile's message contains the address of the opened object, and is empty for some errors.
    reason = getattr(error, "strerror", None) or str(error).rpartition(">: ")[2].rstrip(". ")
    return reason.removeprefix("Error : ") or "it is truncated or damaged"


def _truncated(where: str, announced: str, found: str) -> ParameterError:
    return ParameterError(
        where, f"is truncated: its header announces {announced}, but only {found}"
    )
