"""Audio clips that callers in this process pass as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError
from .resample import MAX_RATE, MIN_RATE, Resampler


def mono_samples(
    samples: npt.ArrayLike, rate: int, to_rate: int, where: str, max_seconds: float, limit: str
) -> Float32Array:
    """Return an audio clip as mono samples of another rate, float32 [M].

    Args:
        samples: The clip, shape [N] or [N, channels]: floats in [-1, 1] or signed integers.
        rate: Its rate in Hz.
        to_rate: The rate of the result.
        where: The name of the field in errors.
        max_seconds: The maximum length in seconds.
        limit: A description of the limit that determines `max_seconds`.

    Raises:
        ParameterError: The shape or the rate is invalid, or the clip is too long.
    """
    found: npt.NDArray[Any] = np.asarray(samples)
    is_audio = found.ndim in (1, 2) and found.size > 0 and found.dtype.kind in "fi"
    if not is_audio or not MIN_RATE <= rate <= MAX_RATE:
        raise ParameterError(
            where,
            f"must be samples of shape [N] or [N, channels] and a rate from {MIN_RATE} to {MAX_RATE} Hz, "
            f"got {found.dtype} {list(found.shape)} at {rate} Hz",
        )
    if len(found) > max_seconds * rate:
        raise ParameterError(
            where,
            f"is {len(found) / rate:.1f} s long, but at most {max_seconds:g} s are allowed ({limit})",
        )
    if found.dtype.kind == "i":
        found = found / -float(np.iinfo(found.dtype).min)
    mono = found.astype(np.float32) if found.ndim == 1 else found.mean(1, dtype=np.float32)
    return Resampler(rate, to_rate).feed(mono, is_end=True)


class AudioArray:
    """An audio clip of mono samples in memory. It is read once, from its start."""

    def __init__(self, samples: Float32Array) -> None:
        self._left = samples

    def read(self, num_samples: int) -> Float32Array:
        """Return the next `num_samples` samples; fewer only at the end."""
        read, self._left = self._left[:num_samples], self._left[num_samples:]
        return read

    def close(self) -> None:
        """Do nothing, because only memory is held."""
