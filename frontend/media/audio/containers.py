"""Decode audio of MP4, M4A, AAC, WebM and Matroska files with PyAV. The files come from clients and are untrusted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError
from .. import containers

_CODECS: Final = {
    "aac": "AAC",
    "alac": "ALAC",
    "flac": "FLAC",
    "mp3": "MP3",
    "mp3float": "MP3",
    "opus": "Opus",
    "libopus": "Opus",
    "vorbis": "Vorbis",
    **dict.fromkeys(
        (f"pcm_{kind}{order}e" for kind in ("s16", "s24", "s32", "f32", "f64") for order in "lb"),
        "PCM",
    ),
}
"""FFmpeg's names of the accepted decoders, and the names of their codecs."""

_COMPLETE: Final = 0.9
"""A track is truncated if less than this part of its announced length can be decoded."""


def container_format(data: bytes) -> str | None:
    """Return FFmpeg's name for a file's format; None if it is none that this module reads."""
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:
        return "aac"
    return containers.container_format(data)


def has_audio(data: bytes) -> bool:
    """Return False if a file of a format that `container_format` recognizes has no audio track."""
    try:
        import av
    except ImportError:
        return True
    try:
        with av.open(io.BytesIO(data), format=container_format(data)) as container:
            return bool(container.streams.audio)
    # For damaged files, PyAV raises many kinds of errors. Reading the file will describe them.
    except Exception:
        return True


class ContainerFile:
    """The first audio track of a file, which FFmpeg decodes. FFmpeg gets only the bytes, so it cannot open other files.

    Args:
        data: A file of a format that `container_format` recognizes.
        where: The name of the field in errors.

    Raises:
        ParameterError: PyAV is not installed, or the file has no audio track that can be read.
    """

    def __init__(self, data: bytes, where: str) -> None:
        try:
            # A late import, because the package is optional.
            import av
        except ImportError:
            raise ParameterError(
                where,
                "is an MP4, AAC or WebM file, which this server cannot decode without PyAV: install the extra "
                "engine-serve[media], or send it as wav",
            ) from None
        container: Any = av.open(io.BytesIO(data), format=container_format(data))
        if not container.streams.audio:
            raise ParameterError(where, "has no audio track; send a file with one")
        stream = container.streams.audio[0]
        codec = stream.codec_context.codec.name if stream.codec_context is not None else "none"
        if codec not in _CODECS:
            names = ", ".join(dict.fromkeys(_CODECS.values()))
            raise ParameterError(
                where, f"has an audio track with the codec {codec}; supported codecs are {names}"
            )
        # One thread decodes, as the limits of its process assume.
        stream.codec_context.thread_type = "NONE"
        self.rate: int = stream.codec_context.sample_rate
        self.num_channels: int = stream.codec_context.channels
        is_known = stream.duration is not None and container.format.name != "aac"
        self.length = round(stream.duration * stream.time_base * self.rate) if is_known else -1
        self.min_length = int(_COMPLETE * self.length)
        self._frames: Iterator[Any] = container.decode(stream)

    def read(self, num_frames: int) -> Float32Array:
        """Return `num_frames` frames or slightly more, [frames, channels] in [-1, 1]; fewer only at the end.

        Raises:
            ValueError: The rate or the number of channels changes.
        """
        parts: list[Float32Array] = []
        num_read = 0
        while num_read < num_frames and (frame := next(self._frames, None)) is not None:
            part = self._samples(frame)
            parts.append(part)
            num_read += len(part)
        return np.concatenate(parts) if parts else np.zeros((0, self.num_channels), np.float32)

    def _samples(self, frame: Any) -> Float32Array:
        """Return the samples of FFmpeg's frame, [frames, channels]."""
        found = frame.sample_rate, frame.layout.nb_channels
        if found != (self.rate, self.num_channels):
            raise ValueError(
                f"its sample rate or number of channels changes from {(self.rate, self.num_channels)} to {found}"
            )
        array = frame.to_ndarray()
        array = array.T if frame.format.is_planar else array.reshape(-1, self.num_channels)
        if array.dtype.kind == "f":
            return np.asarray(array, np.float32)
        return np.asarray(array / 2.0 ** (8 * array.dtype.itemsize - 1), np.float32)
