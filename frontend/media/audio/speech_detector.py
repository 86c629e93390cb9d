"""Find where somebody begins and stops to speak, in audio that arrives in pieces."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ....protocol.arrays import Float32Array
from .windows import FRAME_S, frame_decibels

_MIN_LOUD_FRAMES: Final = 3
"""Successive loud frames with which speech begins. A click is shorter."""

_QUIETEST_DB: Final = -60.0
"""Noise below this power is treated as noise of this power."""

_MIN_MARGIN_DB: Final = 5.0
_MAX_MARGIN_DB: Final = 25.0
"""Decibels by which speech is louder than the noise, for the thresholds 0 and 1."""

_FALL: Final = 0.1
"""Share by which the estimate of the noise moves to the power of a quieter frame."""

_RISE_DB: Final = 1.0 * FRAME_S
"""Decibels by which the estimate of the noise rises with each louder frame: 1 dB per second."""


class Turn(NamedTuple):
    """A change between silence and speech, and the sample at which it was found, from the start of the audio."""

    is_speech: bool
    position: int


class SpeechDetector:
    """Detects speech by its power, compared with the noise in the pauses.

    Args:
        rate: The rate of the audio in Hz.
        threshold: The loudness over the noise from which a sound is speech, from 0 to 1.
        silence_s: Seconds of silence that end speech.
    """

    def __init__(self, rate: int, threshold: float, silence_s: float) -> None:
        self._frame = round(FRAME_S * rate)
        self._margin = _MIN_MARGIN_DB + threshold * (_MAX_MARGIN_DB - _MIN_MARGIN_DB)
        self._max_quiet = max(1, round(silence_s / FRAME_S))
        self._noise = _QUIETEST_DB
        self._rest = np.zeros(0, np.float32)
        self._position = 0
        self._num_loud = self._num_quiet = 0
        self.is_speech = False

    def feed(self, samples: Float32Array) -> list[Turn]:
        """Add samples, and return the changes that were found in them.

        The position of a beginning is that of its first loud frame, and the position of an end is the end of the
        silence after it.
        """
        self._rest = np.concatenate((self._rest, samples))
        turns: list[Turn] = []
        powers = frame_decibels(self._rest, self._frame)
        self._rest = self._rest[len(powers) * self._frame :]
        for power in powers.tolist():
            self._position += self._frame
            if self._is_turn(power):
                self.is_speech = not self.is_speech
                before = _MIN_LOUD_FRAMES * self._frame if self.is_speech else 0
                turns.append(Turn(self.is_speech, self._position - before))
                self._num_loud = self._num_quiet = 0
        return turns

    def reset(self) -> None:
        """Reset the state, because the audio of the speech so far was used or dropped."""
        self.is_speech = False
        self._num_loud = self._num_quiet = 0

    def _is_turn(self, power: float) -> bool:
        """Count a frame, and return whether it ends the current silence or speech."""
        is_loud = power > max(self._noise, _QUIETEST_DB) + self._margin
        if power < self._noise:
            self._noise += _FALL * (power - self._noise)
        else:
            self._noise = min(power, self._noise + _RISE_DB)
        self._num_loud = self._num_loud + 1 if is_loud else 0
        self._num_quiet = 0 if is_loud else self._num_quiet + 1
        if self.is_speech:
            return self._num_quiet >= self._max_quiet
        return self._num_loud >= _MIN_LOUD_FRAMES
