"""Choose the frames of a video file that a model reads, as transformers' video processors do."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ...protocol.config.videos import AnyVideoProcessor

_DYNAMIC_RATES: Final = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))
"""Pairs (maximum length of a video in seconds, frames per second that are read)."""

_DYNAMIC_SECONDS: Final = 2400
_DYNAMIC_FRAMES: Final = 640


class Sampling(NamedTuple):
    """The settings of a request that choose the frames of a video.

    Attributes:
        fps: The number of frames to read per second of a file; for given frames, their own rate.
        num_frames: The number of frames to read from a file.
    """

    fps: float | None = None
    num_frames: int | None = None


DEFAULT_SAMPLING: Final = Sampling()


def sample_frames(
    num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling = DEFAULT_SAMPLING
) -> list[int]:
    """Return the indices of the frames to read from a file, in ascending order.

    Args:
        num_frames: The number of frames in the file.
        fps: The number of frames per second of the file.
        config: The video processor of the model.
        sampling: The settings of the request.
    """
    if config.sampling == "steps":
        return _steps(num_frames, fps, config, sampling)
    if config.sampling == "ends":
        return _ends(num_frames, fps, config, sampling)
    if config.sampling == "inner":
        return _inner(num_frames, fps, config, sampling)
    if config.sampling in ("floors", "middles"):
        return _equal_parts(num_frames, fps, config, sampling)
    if sampling.num_frames is not None:
        numbers = _evenly(num_frames, min(sampling.num_frames, config.max_frames, num_frames))
    elif config.sampling == "dynamic" and sampling.fps is None:
        numbers = _dynamic(num_frames, fps, config)
    else:
        numbers = _seconds(num_frames, fps, config, sampling)
    numbers = sorted(set(numbers))
    return numbers + numbers[-1:] * (-len(numbers) % config.frames_per_patch)


def _evenly(num_frames: int, count: int) -> list[int]:
    numbers: list[int] = np.linspace(0, num_frames - 1, count).round().astype(int).tolist()
    return numbers


def _ends(num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling) -> list[int]:
    wanted = num_frames / fps * (sampling.fps or config.fps)
    count = min(max(int(wanted), config.min_frames), config.max_frames, num_frames)
    if sampling.num_frames is not None:
        count = min(sampling.num_frames, config.max_frames, num_frames)
    return _evenly(num_frames, count)


def _inner(num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling) -> list[int]:
    most = min(sampling.num_frames or config.max_frames, config.max_frames)
    rate, seconds, last = sampling.fps or config.fps, num_frames / fps, num_frames - 1
    count = max(min(round(rate * seconds), most), 1)
    bounds = 0, last
    if seconds - 2 > most * rate:
        first, end = int(fps), min(int(num_frames - fps), last)
        bounds = (first, end) if first < end else bounds
    numbers: list[int] = np.unique(np.linspace(*bounds, count, dtype=int)).tolist()
    return numbers


def _equal_parts(
    num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling
) -> list[int]:
    """Return the first or the middle frame of each of several equal parts."""
    count = sampling.num_frames or config.num_frames
    rate = sampling.fps or (None if count else config.fps)
    if rate is not None:
        count = int(num_frames / fps * rate)
    count = min(max(count, 1), config.max_frames, num_frames)
    if config.sampling == "floors":
        return [number * num_frames // count for number in range(count)]
    step = num_frames / count
    return [int(np.float32(step / 2 + number * step)) for number in range(count)]


def _steps(num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling) -> list[int]:
    wanted = num_frames / fps * (sampling.fps or config.fps)
    unit = config.frames_per_patch
    most = min(config.max_frames, num_frames) // unit * unit
    count = math.floor(min(max(wanted, config.min_frames), most, num_frames) / unit) * unit
    if sampling.num_frames is not None:
        count = min(round(sampling.num_frames / unit) * unit, most)
    # A file with fewer frames than a patch is read completely.
    count = count or num_frames
    step = num_frames / count
    # Rounding may give one more frame, as with a range of floats.
    last = num_frames - 1
    return [min(int(np.float32(i * step)), last) for i in range(math.ceil(num_frames / step))]


def _seconds(
    num_frames: int, fps: float, config: AnyVideoProcessor, sampling: Sampling
) -> list[int]:
    """Return the first frame at or after each of several equal steps of time. In long videos the steps are longer."""
    seconds, wanted = num_frames / fps, sampling.fps or config.fps
    count = max(int(seconds * wanted), 1)
    if seconds <= config.max_seconds and count <= config.max_frames:
        times = np.arange(count) * fps / wanted
    else:
        count = min(int(config.max_seconds * wanted), config.max_frames)
        if count >= num_frames:
            return list(range(num_frames))
        times = np.linspace(0, seconds, count) * fps
    numbers: list[int] = np.minimum(np.ceil(times).astype(int), num_frames - 1).tolist()
    return numbers


def _dynamic(num_frames: int, fps: float, config: AnyVideoProcessor) -> list[int]:
    """Return frames at a rate that depends on the length of the video (GLM-4.6V)."""
    seconds = min(num_frames / fps, _DYNAMIC_SECONDS)
    rate = next(rate for most, rate in _DYNAMIC_RATES if seconds <= most)
    rate *= config.frames_per_patch
    count = min(int(seconds * rate), _DYNAMIC_FRAMES)
    numbers: list[int] = []
    last = num_frames - 1
    if num_frames >= count:
        second, duration = 0.0, 1 / fps
        for number in range(num_frames):
            if number * duration >= second:
                second += 1 / rate
                numbers.append(number)
                if second >= int(num_frames / fps):
                    break
        if len(numbers) == count:
            return numbers
    bounds = (numbers[0], numbers[-1]) if 0 < len(numbers) < count else (0, last)
    even: list[int] = np.linspace(*bounds, count, dtype=int).tolist()
    return even or [0]
