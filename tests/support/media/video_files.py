"""Video files, written with PyAV."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
import pytest

FPS = 10


def write_video(
    file_format: str,
    codec: str,
    count: int,
    size: tuple[int, int] = (64, 48),
    group: int = 8,
    sound: np.ndarray | None = None,
) -> bytes:
    """Return a file whose frames are gray, each brighter than the one before. Skip the test without PyAV.

    Args:
        file_format: FFmpeg's name of the container.
        codec: FFmpeg's name of the encoder.
        count: The number of frames; there are `FPS` per second.
        size: The width and the height.
        group: The frames from one key frame to the next.
        sound: Samples of 16 kHz, int16, which are stored without loss.
    """
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        # This bit rate preserves the brightness of every frame.
        stream.bit_rate = 1 << 24
        stream.codec_context.gop_size = group
        if sound is not None:
            track = container.add_stream("alac", rate=16_000, layout="mono")
            track.codec_context.open()
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), brightness(number, count), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            clip = av.AudioFrame.from_ndarray(sound[None], "s16", "mono")
            clip.sample_rate = 16_000
            size = track.codec_context.frame_size
            resampler = av.AudioResampler(track.codec_context.format, "mono", 16_000, size)
            for each in (*resampler.resample(clip), *resampler.resample(None)):
                container.mux(track.encode(each))
            container.mux(track.encode(None))
    return file.getvalue()


def brightness(number: int, count: int) -> int:
    """Return the brightness of a frame."""
    return 20 + 200 * number // count
