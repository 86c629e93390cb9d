"""Change the sample rate of an audio clip."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np

from ....protocol.arrays import Float32Array

MIN_RATE: Final = 4_000
MAX_RATE: Final = 384_000
"""Maximum sample rate that can be resampled, in Hz."""

_MAX_DOWN: Final = 1000
"""Maximum denominator of the ratio of two rates. Unusual rates are off by at most one part in a million."""

_NUM_COLUMNS: Final = 128
"""Number of outputs per row of the matrix product, unless the ratio of the rates needs more."""

_NUM_CROSSINGS: Final = 32
"""Number of zero crossings of the filter on each side."""

_BETA: Final = 10.0
"""The shape parameter of the Kaiser window: about 100 dB of attenuation."""

_ROLLOFF: Final = 0.94
"""The cutoff of the filter as a share of the lower Nyquist frequency."""


class Resampler:
    """Resamples an audio clip that arrives in blocks, with a windowed sinc filter.

    Each output is a weighted sum of the inputs around it. The outputs are computed as rows of one matrix product. A row
    of `columns` outputs reads `rows_step` inputs, and those within the filter's reach on both sides.

    Args:
        from_rate: The rate of the clip in Hz, from `MIN_RATE` to `MAX_RATE`.
        to_rate: The rate of the result in Hz.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        ratio = Fraction(to_rate, from_rate).limit_denominator(_MAX_DOWN)
        self._ratio = ratio
        self._is_same = ratio == 1
        if self._is_same:
            return
        self._filter, self._step, self._reach = _filter(ratio.numerator, ratio.denominator)
        # The clip is treated as silent before its first sample and after its last.
        self._kept = np.zeros(self._reach, np.float32)
        self._num_inputs = self._num_outputs = 0

    def feed(self, samples: Float32Array, *, is_end: bool = False) -> Float32Array:
        """Add samples, and return the outputs that are now determined, float32 [M]; if `is_end`, all remaining ones."""
        if self._is_same:
            return samples
        self._num_inputs += len(samples)
        parts = [self._kept, samples]
        if is_end:
            parts.append(np.zeros(2 * self._reach + self._step, np.float32))
        inputs = np.concatenate(parts)
        width = self._filter.shape[0]
        num_rows = max(0, (len(inputs) - width) // self._step + 1)
        self._kept = inputs[num_rows * self._step :]
        if not num_rows:
            return np.zeros(0, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(inputs, width)[:: self._step][:num_rows]
        # BLAS does not accept overlapping rows, so they are copied.
        outputs: Float32Array = (np.ascontiguousarray(windows) @ self._filter).reshape(-1)
        if is_end:
            outputs = outputs[: max(0, self._num_wanted() - self._num_outputs)]
        self._num_outputs += len(outputs)
        return outputs

    def _num_wanted(self) -> int:
        """Return the number of outputs for the whole clip, rounded up."""
        return -(-self._num_inputs * self._ratio.numerator // self._ratio.denominator)


@lru_cache(16)
def _filter(up: int, down: int) -> tuple[Float32Array, int, int]:
    """Return the filter matrix of a row, [inputs, outputs], the inputs from row to row, and the filter's reach."""
    repeats = max(1, _NUM_COLUMNS // up)
    columns, step = up * repeats, down * repeats
    cutoff = _ROLLOFF * min(1.0, up / down)
    reach = int(np.ceil(_NUM_CROSSINGS / cutoff))
    # The row's inputs begin `reach` before its first output. An output has weights only for the inputs within reach.
    times = np.arange(columns) * (down / up)
    inputs = np.floor(times).astype(np.intp)[:, None] + np.arange(2 * reach + 1)
    distances = inputs - reach - times[:, None]
    inside = np.clip(1 - (distances / reach) ** 2, 0, None)
    window = np.i0(_BETA * np.sqrt(inside)) / np.i0(_BETA) * (np.abs(distances) <= reach)
    matrix = np.zeros((step + 2 * reach, columns), np.float32)
    matrix[inputs, np.arange(columns)[:, None]] = cutoff * np.sinc(cutoff * distances) * window
    return matrix, step, reach
