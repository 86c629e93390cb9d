"""Decode videos of requests, which are untrusted: container files, animations, and single frames."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from PIL import Image, UnidentifiedImageError

from ...protocol.config.videos import AnyVideoProcessor, VideoProcessor
from ...protocol.errors import ParameterError
from .containers import VideoTrack, container_format, read_container
from .decode import decode_image, to_rgb
from .frame_sampling import Sampling, sample_frames
from .layouts.pixels import Sizes, Video
from .sources.data_urls import read_base64, read_data_url

MAX_FILE_FRAMES: Final = 4096
"""Maximum frames of an animation, only some of which are read."""

MAX_VIDEO_PIXELS: Final = 1 << 27
"""Maximum total pixels of all frames of a video, including frames that are not read."""

TIMEOUT_S: Final = 20.0
"""Maximum seconds to decode the frames of a video."""


Fit: TypeAlias = Callable[[int, int, int], Sizes]
"""Function from (width, height, number of frames) to the sizes to which frames are resized.

It raises ValueError if the model cannot read the frames.
"""

_FORMATS: Final = ("GIF", "WEBP", "PNG")
_FRAMES_URL: Final = "data:video/jpeg;base64,"
_DEFAULT_DURATION_MS: Final = 100


def open_video(
    source: str | bytes | Sequence[str | Image.Image],
    sampling: Sampling,
    where: str,
    config: AnyVideoProcessor,
    fit: Fit,
) -> Video:
    """Return the chosen frames of a video in RGB, in the size that the model reads.

    Args:
        source: A data URL, the content of a file or animation, or the frames: data URLs or Pillow's images. A URL of
            the type video/jpeg has JPEG files in base64, with commas between them.
        sampling: The choice of frames to read. By default they have the rate that the model expects.
        where: The name of the field in errors.
        config: The video processor of the model.
        fit: Returns the sizes of frames.

    Raises:
        ParameterError: The source is not a video that can be read, or it is too large.
    """
    video = _read(source, sampling, where, config, fit)
    if isinstance(config, VideoProcessor) and config.nominal_fps:
        return video._replace(sampled_fps=sampling.fps or config.nominal_fps)
    return video


def _read(
    source: str | bytes | Sequence[str | Image.Image],
    sampling: Sampling,
    where: str,
    config: AnyVideoProcessor,
    fit: Fit,
) -> Video:
    if isinstance(source, str) and source[: len(_FRAMES_URL)].lower() == _FRAMES_URL:
        return _given_frames(
            source[len(_FRAMES_URL) :].split(","),
            lambda text: read_base64(text, where),
            sampling.fps,
            where,
            config,
            fit,
        )
    if isinstance(source, str):
        source = read_data_url(source, where)
    if isinstance(source, bytes):
        read_file = _animation if container_format(source) is None else _container
        return read_file(source, sampling, where, config, fit)
    return _given_frames(
        source, lambda url: read_data_url(url, where), sampling.fps, where, config, fit
    )


def _given_frames(
    frames: Sequence[str | Image.Image],
    read: Callable[[str], bytes],
    fps: float | None,
    where: str,
    config: AnyVideoProcessor,
    fit: Fit,
) -> Video:
    """Return a video that consists of all of these frames. `read` returns the file of a frame that is not an image."""
    if not 0 < len(frames) <= config.max_frames:
        raise ParameterError(where, f"must have 1 to {config.max_frames} frames, got {len(frames)}")
    budget = _Budget(where)
    found: list[Image.Image] = []
    given: tuple[int, int] | None = None
    sizes: Sizes = ()
    for frame in frames:
        image = (
            to_rgb(frame) if isinstance(frame, Image.Image) else decode_image(read(frame), where)
        )
        if given is None:
            given, sizes = image.size, _fit(fit, image.size, len(frames), where)
        if image.size != given:
            raise ParameterError(
                where, f"has frames of {given} and {image.size} pixels; send frames of one size"
            )
        budget.spend(image)
        found.append(_resize(image, sizes, config))
    fps = fps or config.fps
    return Video(found, list(range(len(found))), fps, fps, (len(found) - 1) / fps)


def _container(
    data: bytes, sampling: Sampling, where: str, config: AnyVideoProcessor, fit: Fit
) -> Video:
    """Return the chosen frames of an MP4, WebM or Matroska file."""
    numbers: list[int] = []
    sizes: Sizes = ()

    def choose(track: VideoTrack) -> list[int]:
        nonlocal numbers, sizes
        numbers = sample_frames(track.num_frames, track.fps, config, sampling)
        sizes = _fit(fit, (track.width, track.height), len(numbers), where)
        return numbers

    def shrink(frame: Image.Image) -> Image.Image:
        return _resize(frame, sizes, config)

    track, frames = read_container(data, where, choose, shrink, _Budget(where).check_time)
    sampled_fps = len(frames) / track.num_frames * track.fps
    return Video(frames, numbers, track.fps, sampled_fps, track.num_frames / track.fps)


def _animation(
    data: bytes, sampling: Sampling, where: str, config: AnyVideoProcessor, fit: Fit
) -> Video:
    budget = _Budget(where)
    try:
        with warnings.catch_warnings():
            # Pillow's own limit is off; the limit is checked below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        durations_ms = _durations(image, budget, where)
        num_frames = len(durations_ms)
        fps = 1000 * num_frames / sum(durations_ms)
        numbers = sample_frames(num_frames, fps, config, sampling)
        sizes = _fit(fit, image.size, len(numbers), where)
        frames = []
        for number in numbers:
            image.seek(number)
            frames.append(_resize(to_rgb(image), sizes, config))
            budget.check_time()
        sampled_fps = len(frames) / num_frames * fps
        return Video(frames, numbers, fps, sampled_fps, num_frames / fps)
    except (ParameterError, MemoryError):
        raise
    # For damaged files, the decoders raise many kinds of errors.
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is none of MP4, WebM, MKV, {', '.join(_FORMATS)}"
        raise ParameterError(
            where,
            f"is not a video that can be read: {reason}; send such a file, or frames as {_FRAMES_URL}…,…",
        ) from None


def _durations(image: Image.Image, budget: _Budget, where: str) -> list[float]:
    """Return the duration of each frame of an animation in seconds.

    Pillow's frame count would scan the whole file, which may have millions of frames.
    """
    durations_ms: list[float] = []
    while True:
        try:
            image.seek(len(durations_ms))
        except EOFError:
            return durations_ms
        if len(durations_ms) == MAX_FILE_FRAMES:
            raise ParameterError(where, f"has more than {MAX_FILE_FRAMES} frames; send fewer")
        budget.spend(image)
        durations_ms.append(image.info.get("duration") or _DEFAULT_DURATION_MS)


def _resize(frame: Image.Image, sizes: Sizes, config: AnyVideoProcessor) -> Image.Image:
    for size in sizes:
        frame = frame.resize(size, Image.Resampling(config.resample))
    return frame


def _fit(fit: Fit, size: tuple[int, int], num_frames: int, where: str) -> Sizes:
    try:
        return fit(*size, num_frames)
    except ValueError as error:
        raise ParameterError(where, f"cannot be read by this model: {error}") from None


class _Budget:
    """Limits on the total pixels and the decoding time of a video."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_pixels = 0
        self._end = time.monotonic() + TIMEOUT_S

    def spend(self, image: Image.Image) -> None:
        """Count a frame with the size of an image."""
        self._num_pixels += image.width * image.height
        if self._num_pixels > MAX_VIDEO_PIXELS:
            raise ParameterError(
                self._where,
                f"is too large: its frames have {self._num_pixels} pixels or more, and at most {MAX_VIDEO_PIXELS} are "
                "allowed; send fewer or smaller frames",
            )
        self.check_time()

    def check_time(self) -> None:
        """Raise `ParameterError` if the time is over."""
        if time.monotonic() > self._end:
            raise ParameterError(
                self._where,
                f"takes more than {TIMEOUT_S:g} s to decode; send fewer or smaller frames",
            )
