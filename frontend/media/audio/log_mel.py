"""Compute log-mel features of audio, equal to the results of transformers' `WhisperFeatureExtractor`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from ....protocol.arrays import Float32Array

RATE: Final = 16_000
HOP: Final = 160
WINDOW: Final = 400
"""Samples per second, samples from a frame to the next, and samples per frame."""

_PAIRED_FFT: Final = 512
"""Samples of the Fourier transform of Granite Speech, whose frames are filled with zeros."""

_MAX_HZ: Final = 8000.0
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0
"""Values more than this many decades below the maximum are clipped."""

# Slaney's mel scale: linear below 1000 Hz, logarithmic above (Auditory Toolbox, 1998).
_HZ_PER_MEL: Final = 200 / 3
_FIRST_LOG_HZ: Final = 1000.0
_FIRST_LOG_MEL: Final = _FIRST_LOG_HZ / _HZ_PER_MEL
_MELS_PER_E: Final = 27.0 / float(np.log(6.4))


def log_mel(samples: Float32Array, num_samples: int, num_mel_bins: int) -> Float32Array:
    """Return log-mel features (Whisper, arXiv 2212.04356, section 2.2), float32 [num_mel_bins, num_samples // HOP].

    Args:
        samples: The samples at `RATE`, float32 [N] in [-1, 1], N at most `num_samples`.
        num_samples: The length to which the samples are padded with silence.
        num_mel_bins: The number of features per frame.
    """
    num_frames = num_samples // HOP
    half = WINDOW // 2
    # All later frames are silent, so they need no computation.
    num_loud = min(num_frames, (len(samples) + half) // HOP + 1)
    filled = np.zeros(min(num_samples, num_loud * HOP + WINDOW), np.float32)
    filled[: len(samples)] = samples
    padded = np.pad(filled, half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_loud]
    spectrum = np.fft.rfft(frames * _hann(), axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
    features = np.full((num_mel_bins, num_frames), np.log10(np.float32(_FLOOR)), np.float32)
    loud = _mel_filters(num_mel_bins) @ power.T
    features[:, :num_loud] = np.log10(np.maximum(loud, _FLOOR, out=loud), out=loud)
    np.maximum(features, features.max() - _RANGE, out=features)
    features += 4
    features /= 4
    return features


def paired_log_mel(samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return log-mel features of pairs of frames, equal to those of transformers' `GraniteSpeechFeatureExtractor`.

    Returns:
        The features of both frames of each pair, float32 [2 * num_mel_bins, pairs].

    Args:
        samples: The samples at `RATE`, float32 [N] in [-1, 1].
        num_mel_bins: The number of features per frame.
    """
    num_frames = len(samples) // HOP + 1
    if num_frames < 2:
        return np.zeros((2 * num_mel_bins, 0), np.float32)
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    spectrum = np.fft.rfft(frames * _hann(), _PAIRED_FFT, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
    features = np.log10(np.maximum(power @ _htk_filters(num_mel_bins), np.float32(_FLOOR)))
    features = np.maximum(features, features.max() - np.float32(_RANGE)) / 4 + 1
    # A last frame without a partner counts only for the maximum.
    pairs = features[: num_frames // 2 * 2].reshape(num_frames // 2, -1)
    paired: Float32Array = pairs.T.astype(np.float32)
    return paired


@lru_cache
def _htk_filters(num_mel_bins: int) -> Float32Array:
    """Return triangular filters on the mel scale of HTK, float32 [frequencies, num_mel_bins]."""

    def to_mel(hz: float) -> float:
        return 2595.0 * float(np.log10(1.0 + hz / 700.0))

    mels = np.linspace(0.0, to_mel(_MAX_HZ), num_mel_bins + 2)
    edges = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    hz = np.linspace(0.0, RATE / 2, _PAIRED_FFT // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising = (hz - edges[:-2]) / widths[:-1]
    falling = (edges[2:] - hz) / widths[1:]
    filters: Float32Array = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    return filters


@lru_cache(1)
def _hann() -> Float32Array:
    """Return the periodic Hann window, float32 [WINDOW]."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


@lru_cache(4)
def _mel_filters(num_mel_bins: int) -> Float32Array:
    """Return the weight of each frequency in each feature, float32 [num_mel_bins, WINDOW // 2 + 1].

    The filters are overlapping triangles of equal area. The triangle of feature i extends from the center of feature i
    - 1 to that of feature i + 1.
    """
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    top = _FIRST_LOG_MEL + np.log(_MAX_HZ / _FIRST_LOG_HZ) * _MELS_PER_E
    mels = np.linspace(0, top, num_mel_bins + 2)
    corners = np.where(
        mels < _FIRST_LOG_MEL,
        mels * _HZ_PER_MEL,
        _FIRST_LOG_HZ * np.exp((mels - _FIRST_LOG_MEL) / _MELS_PER_E),
    )
    widths = np.diff(corners)
    slopes = corners[:, None] - frequencies[None, :]
    rising = -slopes[:-2] / widths[:-1, None]
    falling = slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)
