"""Cuts a sound into windows that a model reads, at quiet places."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np

from ...protocol.arrays import Float32Array

SEARCH_SHARE: Final = 1 / 3
"""A window that is not the last is cut in its last third, where it is quietest."""

_FRAME_S: Final = 0.02
"""Seconds whose mean power is compared."""

_QUIET_FRAMES: Final = 15
"""Frames around a cut that should be quiet: a pause between sentences is longer, one within a word is shorter."""


class Samples(Protocol):
    """A sound that is read once, from its start."""

    def read(self, num_samples: int) -> Float32Array:
        """Return at least so many of the next samples; fewer only at the end."""

    def close(self) -> None:
        """Release what is held for the rest of the sound."""


class Window(NamedTuple):
    """A part of a sound: its samples, and its first sample's position in the sound."""

    start: int
    samples: Float32Array


class Windows:
    """Cuts a sound into windows that follow each other, so that each word is in one of them.

    A cut is at the middle of the longest quiet place in the last third of the longest possible window.

    Args:
        sound: The sound.
        rate: Its rate in samples per second.
        max_seconds: The maximum length of a window.
    """

    def __init__(self, sound: Samples, rate: int, max_seconds: float) -> None:
        self._sound = sound
        self._frame = round(_FRAME_S * rate)
        self._max_samples = int(max_seconds * rate)
        self._kept = np.zeros(0, np.float32)
        self._start = 0
        self._is_ended = False

    def next_window(self) -> Window | None:
        """Return the next window; None after the last.

        Raises:
            ParameterError: The sound is damaged or too long.
        """
        # One more sample shows whether this is the last window.
        missing = self._max_samples + 1 - len(self._kept)
        if missing > 0 and not self._is_ended:
            read = self._sound.read(missing)
            self._is_ended = len(read) < missing
            self._kept = np.concatenate((self._kept, read))
        if not len(self._kept):
            return None
        size = len(self._kept)
        if size > self._max_samples:
            size = self._find_cut()
        window = Window(self._start, self._kept[:size])
        self._kept = self._kept[size:]
        self._start += size
        return window

    def _find_cut(self) -> int:
        """Return the position of the quietest place, where the power of the frames around it is least."""
        first = int(self._max_samples * (1 - SEARCH_SHARE))
        searched = self._kept[first : self._max_samples]
        num_frames = len(searched) // self._frame
        if num_frames <= _QUIET_FRAMES:
            return self._max_samples
        frames = searched[: num_frames * self._frame].reshape(num_frames, self._frame)
        # In decibels, so that one loud frame does not hide the quiet ones beside it.
        power = 10 * np.log10(np.square(frames).mean(axis=1) + 1e-9)
        around = np.convolve(power, np.full(_QUIET_FRAMES, 1 / _QUIET_FRAMES), mode="valid")
        # Of equally quiet places the middle one, because the next word may begin after the last.
        quietest = np.flatnonzero(around <= around.min() + 1e-6)
        middle = int(quietest[len(quietest) // 2]) + _QUIET_FRAMES // 2
        return first + middle * self._frame + self._frame // 2
