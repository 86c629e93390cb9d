"""Cut an audio clip at quiet places into windows of the length that a model reads."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np

from ....protocol.arrays import Float32Array

SEARCH_SHARE: Final = 1 / 3
"""The last part of a window in which a cut is searched for, as a share of the window."""

FRAME_S: Final = 0.02
"""Seconds of the frames whose mean powers are compared."""

_QUIET_FRAMES: Final = 15
"""Number of frames around a cut that should be quiet.

A pause between sentences is longer, one within a word shorter.
"""


class Samples(Protocol):
    """An audio clip that is read once, from its start."""

    def read(self, num_samples: int) -> Float32Array:
        """Return at least `num_samples` of the next samples; fewer only at the end."""

    def close(self) -> None:
        """Release the resources that are held for the rest of the clip."""


class Window(NamedTuple):
    """A part of an audio clip: its samples, and the position of its first sample in the clip."""

    start: int
    samples: Float32Array


class Windows:
    """Cuts an audio clip into successive windows, so that no word is cut.

    A cut is at the middle of the longest quiet place in the last third of the longest possible window.

    Args:
        clip: The clip.
        rate: The rate of the clip in Hz.
        max_seconds: The maximum length of a window in seconds.
    """

    def __init__(self, clip: Samples, rate: int, max_seconds: float) -> None:
        self._clip = clip
        self._rate = rate
        self._max_samples = int(max_seconds * rate)
        self._kept = np.zeros(0, np.float32)
        self._start = 0
        self._is_ended = False

    def next_window(self) -> Window | None:
        """Return the next window; None after the last. Raise ParameterError if the clip is damaged or too long."""
        # One more sample shows whether this is the last window.
        missing = self._max_samples + 1 - len(self._kept)
        if missing > 0 and not self._is_ended:
            read = self._clip.read(missing)
            self._is_ended = len(read) < missing
            self._kept = np.concatenate((self._kept, read))
        if not len(self._kept):
            return None
        size = len(self._kept)
        if size > self._max_samples:
            size = find_cut(self._kept, self._max_samples, self._rate)
        window = Window(self._start, self._kept[:size])
        self._kept = self._kept[size:]
        self._start += size
        return window


def find_cut(samples: Float32Array, max_samples: int, rate: int) -> int:
    """Return the position in the last third of a window where the power of the frames around it is lowest."""
    frame = round(FRAME_S * rate)
    first = int(max_samples * (1 - SEARCH_SHARE))
    searched = samples[first:max_samples]
    num_frames = len(searched) // frame
    if num_frames <= _QUIET_FRAMES:
        return max_samples
    # Compare decibels, so that a single loud frame does not hide the quiet frames around it.
    power = frame_decibels(searched, frame)
    around = np.convolve(power, np.full(_QUIET_FRAMES, 1 / _QUIET_FRAMES), mode="valid")
    # If several places are equally quiet, use the middle one, because the next word may begin right after the last.
    quietest = np.flatnonzero(around <= around.min() + 1e-6)
    middle = int(quietest[len(quietest) // 2]) + _QUIET_FRAMES // 2
    return first + middle * frame + frame // 2


def frame_decibels(samples: Float32Array, frame: int) -> Float32Array:
    """Return the mean power of each whole frame, float32 [frames], from -90 dB (silence) to 0 dB."""
    num_frames = len(samples) // frame
    frames = samples[: num_frames * frame].reshape(num_frames, frame)
    power: Float32Array = 10 * np.log10(np.square(frames).mean(axis=1) + np.float32(1e-9))
    return power
