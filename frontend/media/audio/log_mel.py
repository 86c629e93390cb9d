"""Compute log-mel features of audio, equal to those of transformers' feature extractors.

Functions take mono samples at `RATE`, float32 [N] in [-1, 1], and the number of features of a frame. Unless they say
otherwise, they return float32 [num_features, frames].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Float32Array

_Float = TypeVar("_Float", bound=np.floating[Any])

RATE: Final = 16_000
HOP: Final = 160
WINDOW: Final = 400
"""Samples per second, samples from a frame to the next, and samples per frame."""

_DECIBELS: Final = 120.0
"""The range of MiDashengLM's features."""

_PAIRED_FFT: Final = 512
"""Samples of the Fourier transform of Granite Speech and Cohere Transcribe, whose frames are filled with zeros."""

_DITHER: Final = 1e-5
_EMPHASIS: Final = 0.97
_MIN_DEVIATION: Final = 1e-5
"""Cohere Transcribe: the deviation of noise, the share of a sample that is subtracted from the next, and a term."""

_STACKED: Final = 7
_STACKED_STRIDE: Final = 6
_STACKED_MIN_HZ: Final = 20.0
"""Fun-ASR-Nano: frames of a row, frames from a row to the next, and the lowest frequency."""

_LEVEL: Final = 10 ** (-25 / 20)
_LEVEL_TERM: Final = 1e-6
"""VibeVoice ASR: the level of clips, and a term."""

_PAIR_VARIANCE: Final = 1e-7
"""Wav2Vec2-BERT: a number that is added to the variance of each feature."""

_MEDICAL_HZ: Final = (125.0, 7500.0)
_MEDICAL_FLOOR: Final = 1e-5
"""MedASR: the lowest and the highest frequency, and the minimum of the power of a feature."""

_MAX_HZ: Final = 8000.0
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0
"""Values more than this many decades below the maximum are clipped."""

_LOUDEST: Final = 1.5
"""The maximum, in decades, that Voxtral Realtime assumes for every clip."""

# Slaney's mel scale: linear below 1000 Hz, logarithmic above (Auditory Toolbox, 1998).
_HZ_PER_MEL: Final = 200 / 3
_FIRST_LOG_HZ: Final = 1000.0
_FIRST_LOG_MEL: Final = _FIRST_LOG_HZ / _HZ_PER_MEL
_MELS_PER_E: Final = 27.0 / float(np.log(6.4))


def log_mel(samples: Float32Array, num_samples: int, num_mel_bins: int) -> Float32Array:
    """Return log-mel features of samples that are padded to `num_samples` (Whisper, arXiv 2212.04356, section 2.2)."""
    num_frames = num_samples // HOP
    half = WINDOW // 2
    # All later frames are silent, so they need no computation.
    num_loud = min(num_frames, (len(samples) + half) // HOP + 1)
    filled = np.zeros(min(num_samples, num_loud * HOP + WINDOW), np.float32)
    filled[: len(samples)] = samples
    padded = np.pad(filled, half, mode="reflect")
    power = _powers(_frames(padded)[:num_loud] * _hann(WINDOW), WINDOW)
    features = np.full((num_mel_bins, num_frames), np.log10(np.float32(_FLOOR)), np.float32)
    loud = _mel_filters(num_mel_bins) @ power.T
    features[:, :num_loud] = np.log10(np.maximum(loud, _FLOOR, out=loud), out=loud)
    return _scaled(features, features.max() - _RANGE)


def _scaled(features: Float32Array, least: float) -> Float32Array:
    """Return features of at least `least`, scaled to a range of 2. The array is changed."""
    np.maximum(features, np.float32(least), out=features)
    features += 4
    features /= 4
    return features


def framed_log_mel(samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return log-mel features of the whole frames in samples, equal to those of `VoxtralRealtimeFeatureExtractor`."""
    power = _powers(_frames(samples) * _hann(WINDOW), WINDOW)
    features = np.log10(np.maximum(_mel_filters(num_mel_bins) @ power.T, np.float32(_FLOOR)))
    return _scaled(features, _LOUDEST - _RANGE)


def normed_log_mel(
    samples: Float32Array, num_mel_bins: int, *, has_dither: bool = True
) -> Float32Array:
    """Return normed log-mel features, equal to those of `CohereAsrFeatureExtractor`.

    Without dither, which is a little noise, they are equal to those of `ParakeetFeatureExtractor`. Every feature has
    the mean 0 and the deviation 1 over all frames. A clip of less than two frames is filled with silence.
    """
    samples = np.pad(samples, (0, max(0, 2 * HOP - len(samples))))
    num_frames = len(samples) // HOP
    x = samples + np.float32(_DITHER) * seeded_noise(len(samples)) if has_dither else samples
    x = np.append(x[:1], x[1:] - np.float32(_EMPHASIS) * x[:-1])
    margin = (_PAIRED_FFT - WINDOW) // 2
    # Frames are filled with zeros on both sides.
    padded = np.pad(x, _PAIRED_FFT // 2)[margin:]
    window = np.hanning(WINDOW).astype(np.float32)
    power = _powers(_frames(padded)[:num_frames] * window, _PAIRED_FFT)
    features = np.log(_mel_filters(num_mel_bins, _PAIRED_FFT) @ power.T + np.float32(2**-24))
    features -= features.mean(1, keepdims=True)
    deviation = np.sqrt(np.square(features).sum(1, keepdims=True) / (num_frames - 1))
    normed: Float32Array = (features / (deviation + _MIN_DEVIATION)).astype(np.float32)
    return normed


def seeded_noise(count: int) -> Float32Array:
    """Return the normally distributed numbers of a torch generator whose seed is their number, float32 [count].

    Args:
        count: The number, at least 16.
    """
    # The generator is the Mersenne twister. Of each number, 24 bits are used.
    num_drawn = count + (16 if count % 16 else 0)
    drawn = np.frombuffer(np.random.RandomState(count).bytes(4 * num_drawn), "<u4")
    uniform = (drawn & 0xFFFFFF) * 2.0**-24
    # Pairs at a distance of 8 are transformed (Box and Muller, 1958). The last 16 numbers are drawn again.
    if count % 16:
        whole = count // 16 * 16
        blocks = np.concatenate((uniform[:whole], uniform[count:])).reshape(-1, 2, 8)
    else:
        blocks = uniform.reshape(-1, 2, 8)
    radius = np.sqrt(-2 * np.log(1 - blocks[:, 0]))
    angle = 2 * np.pi * blocks[:, 1]
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1).reshape(-1)
    noise: Float32Array = np.empty(count, np.float32)
    if count % 16:
        noise[:whole] = pairs[:whole]
        noise[-16:] = pairs[-16:]
    else:
        noise[:] = pairs
    return noise


def paired_log_mel(samples: Float32Array, num_features: int) -> Float32Array:
    """Return log-mel features of pairs of frames, equal to those of `GraniteSpeechFeatureExtractor`."""
    num_frames = len(samples) // HOP + 1
    if num_frames < 2:
        return np.zeros((num_features, 0), np.float32)
    features = _limited_log_mel(samples, num_features // 2, num_frames)
    # A last frame without a partner counts only for the maximum.
    return _pairs(features[: num_frames // 2 * 2])


def paired_log_mel_changes(samples: Float32Array, num_features: int) -> Float32Array:
    """Return the features of pairs of frames and how they change, equal to those of `GraniteSpeech5FeatureExtractor`.

    Half of the features are changes.
    """
    # A last frame without a partner gets one.
    num_frames = 2 * max(1, -(-(len(samples) // HOP) // 2))
    missing = (num_frames - 1) * HOP + 1 - len(samples)
    filled = np.pad(samples, (0, max(0, missing)))
    features = _limited_log_mel(filled, num_features // 4, num_frames)
    before, after = (
        np.vstack(x) for x in ((features[:1], features[:-1]), (features[1:], features[-1:]))
    )
    return _pairs(np.hstack((features, (after - before) / 2)))


def _limited_log_mel(samples: Float32Array, num_mel_bins: int, num_frames: int) -> Float32Array:
    """Return features not far below the maximum, float32 [num_frames, num_mel_bins]."""
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    power = _powers(_frames(padded)[:num_frames] * _hann(WINDOW), _PAIRED_FFT)
    filters = _htk_filters(num_mel_bins, _PAIRED_FFT, 0.0, _MAX_HZ).astype(np.float32)
    features = np.log10(np.maximum(power @ filters, np.float32(_FLOOR)))
    limited: Float32Array = np.maximum(features, features.max() - np.float32(_RANGE)) / 4 + 1
    return limited


def _pairs(features: npt.NDArray[Any]) -> Float32Array:
    """Return the rows of each pair, one after the other, as a column."""
    paired: Float32Array = features.reshape(len(features) // 2, -1).T.astype(np.float32)
    return paired


def standardized(samples: Float32Array, variance_term: float) -> Float32Array:
    """Return samples with the mean 0 and the deviation 1, equal to those of `Wav2Vec2FeatureExtractor`."""
    centered = samples - samples.mean()
    scaled: Float32Array = centered / np.sqrt(
        np.square(centered).mean() + np.float32(variance_term)
    )
    return scaled


def level(samples: Float32Array) -> Float32Array:
    """Return samples at a level of -25 dB, equal to those of `VibeVoiceAcousticTokenizerFeatureExtractor`."""
    power = np.sqrt(np.square(samples).mean(dtype=np.float64))
    leveled = samples * np.float32(_LEVEL / (power + _LEVEL_TERM))
    loudest = float(np.abs(leveled).max(initial=0.0))
    return leveled / np.float32(loudest + _LEVEL_TERM) if loudest > 1 else leveled


def stacked_log_mel(samples: Float32Array, num_features: int) -> Float32Array:
    """Return Kaldi's log-mel features of stacked frames, equal to those of `FunAsrNanoFeatureExtractor`."""
    features = _kaldi_log_mel(samples, num_features // _STACKED, np.hamming(WINDOW))
    if not len(features):
        return np.zeros((num_features, 0), np.float32)
    # Rows are centered at every sixth frame. The first and the last frame are repeated.
    num_rows = -(-len(features) // _STACKED_STRIDE)
    first = _STACKED_STRIDE * np.arange(num_rows)[:, None] - _STACKED // 2
    chosen = (first + np.arange(_STACKED)).clip(0, len(features) - 1)
    stacked: Float32Array = features[chosen].reshape(num_rows, -1).T.astype(np.float32)
    return stacked


def decibels(samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return mel features in decibels of more than half a frame, as MiDashengLM's encoder computes them."""
    padded = np.pad(samples, _PAIRED_FFT // 2, mode="reflect")
    power = _powers(_frames(padded, _PAIRED_FFT) * _hann(_PAIRED_FFT), _PAIRED_FFT)
    filters = _htk_filters(num_mel_bins, _PAIRED_FFT, 0.0, _MAX_HZ).astype(np.float32)
    features = 10 * np.log10(np.maximum(power @ filters, np.float32(_FLOOR))).T
    limited: Float32Array = np.maximum(features, features.max() - np.float32(_DECIBELS))
    return limited


def kaldi_log_mel(samples: npt.NDArray[_Float], num_mel_bins: int) -> npt.NDArray[_Float]:
    """Return log-mel features with Kaldi's own window and the range of 16-bit integers, in the dtype of the samples."""
    integers = samples * samples.dtype.type(1 << 15)
    return _kaldi_log_mel(integers, num_mel_bins, np.hanning(WINDOW) ** 0.85).T


def standardized_kaldi_log_mel(samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return log-mel features with the mean 0 and the deviation 1, equal to those of `Speech2TextFeatureExtractor`.

    The samples have one frame at least.
    """
    features = kaldi_log_mel(samples.astype(np.float64), num_mel_bins)
    deviations = features.std(1, keepdims=True)
    # Features of silence do not vary.
    centered = features - features.mean(1, keepdims=True)
    scaled: Float32Array = (centered / np.maximum(deviations, _MIN_DEVIATION)).astype(np.float32)
    return scaled


def paired_kaldi_log_mel(samples: Float32Array, num_features: int) -> Float32Array:
    """Return standardized log-mel features of pairs of frames, equal to those of `SeamlessM4TFeatureExtractor`.

    The samples have two frames at least. A last frame without a partner only counts for the means and deviations.
    """
    # As in transformers, features are computed in float64, which matters where a clip is silent.
    features = kaldi_log_mel(samples.astype(np.float64), num_features // 2).T
    features = (features - features.mean(0)) / np.sqrt(features.var(0, ddof=1) + _PAIR_VARIANCE)
    return _pairs(features[: len(features) // 2 * 2])


def medical_log_mel(samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return log-mel features of frames without emphasis, equal to those of `LasrFeatureExtractor`."""
    if len(samples) < WINDOW:
        return np.zeros((num_mel_bins, 0), np.float32)
    power = _powers(_frames(samples.astype(np.float64)) * np.hanning(WINDOW), _PAIRED_FFT)
    power = power @ _kaldi_filters(num_mel_bins, *_MEDICAL_HZ)
    features: Float32Array = np.log(np.maximum(power, _MEDICAL_FLOOR)).T.astype(np.float32)
    return features


def _kaldi_log_mel(
    samples: npt.NDArray[_Float], num_mel_bins: int, window: npt.NDArray[np.float64]
) -> npt.NDArray[_Float]:
    """Return Kaldi's log-mel features [frames, num_mel_bins]."""
    if len(samples) < WINDOW:
        return np.zeros((0, num_mel_bins), samples.dtype)
    frames = _frames(samples)
    frames = frames - frames.mean(1, keepdims=True)
    previous = np.hstack((frames[:, :1], frames[:, :-1]))
    emphasized = (frames - _EMPHASIS * previous) * window.astype(samples.dtype)
    power = _powers(emphasized, _PAIRED_FFT)
    filters = _kaldi_filters(num_mel_bins, _STACKED_MIN_HZ, _MAX_HZ).astype(samples.dtype)
    features: npt.NDArray[_Float] = np.log(np.maximum(power @ filters, np.finfo(np.float32).eps))
    return features


class ClipFrames(NamedTuple):
    """The frames of a clip that has its own features.

    `emphasis` is the share of each sample that is subtracted from the next one. Magnitudes below `floor` become it or,
    if `adds_floor`, are increased by it. With `leads`, half a frame of silence precedes the clip. The clip is filled
    with silence up to a multiple of `multiple` samples.
    """

    size: int
    fft_size: int
    min_hz: float
    max_hz: float
    emphasis: float
    floor: float
    adds_floor: bool
    leads: bool
    multiple: int


EMPHASIZED: Final = ClipFrames(512, 1024, 125.0, 7600.0, 0.97, 1e-5, False, False, 128)
LEADING: Final = ClipFrames(320, 512, 0.0, _MAX_HZ, 0.0, 1e-3, True, True, 1)
"""The frames of Gemma 3n and of Gemma 4."""


def clip_log_mel(frames: ClipFrames, samples: Float32Array, num_mel_bins: int) -> Float32Array:
    """Return natural logarithms of mel features, equal to those of the extractors for Gemma 3n and Gemma 4."""
    before = frames.size // 2 if frames.leads else 0
    padded = np.pad(samples, (before, -len(samples) % frames.multiple))
    # A frame needs one more sample, which only other kinds of emphasis would read.
    if len(padded) <= frames.size:
        return np.zeros((num_mel_bins, 0), np.float32)
    parts = _frames(padded, frames.size + 1)[:, :-1]
    if frames.emphasis:
        first = parts[:, :1] * np.float32(1 - frames.emphasis)
        parts = np.hstack((first, parts[:, 1:] - np.float32(frames.emphasis) * parts[:, :-1]))
    spectrum = np.fft.rfft(parts * _hann(frames.size), frames.fft_size, axis=1)
    filters = _htk_filters(num_mel_bins, frames.fft_size, frames.min_hz, frames.max_hz)
    magnitudes = np.abs(spectrum) @ filters
    if frames.adds_floor:
        magnitudes += frames.floor
    else:
        magnitudes = np.maximum(magnitudes, frames.floor)
    features: Float32Array = np.log(magnitudes).T.astype(np.float32)
    return features


def _frames(samples: npt.NDArray[_Float], size: int = WINDOW) -> npt.NDArray[_Float]:
    """Return a view of the whole frames in samples, [frames, size]."""
    return np.lib.stride_tricks.sliding_window_view(samples, size)[::HOP]


def _powers(frames: npt.NDArray[_Float], fft_size: int) -> npt.NDArray[_Float]:
    """Return the power of each frequency in frames that are filled with zeros, [frames, fft_size // 2 + 1]."""
    spectrum = np.fft.rfft(frames, fft_size, axis=1)
    return (spectrum.real**2 + spectrum.imag**2).astype(frames.dtype, copy=False)


@lru_cache(4)
def _hann(size: int) -> Float32Array:
    """Return the periodic Hann window, float32 [size]."""
    return np.hanning(size + 1)[:-1].astype(np.float32)


def _frequencies(fft_size: int) -> npt.NDArray[np.float64]:
    return np.linspace(0.0, RATE / 2, fft_size // 2 + 1)


def _triangles(
    corners: npt.NDArray[np.float64], points: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the values at points of overlapping triangles of height 1, float64 [points, len(corners) - 2].

    Triangle i extends from corner i to corner i + 2.
    """
    widths = np.diff(corners)
    rising = (points[:, None] - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - points[:, None]) / widths[1:]
    triangles: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    return triangles


@lru_cache(8)
def _htk_filters(
    num_mel_bins: int, fft_size: int, min_hz: float, max_hz: float
) -> npt.NDArray[np.float64]:
    """Return triangular filters on the mel scale of HTK, float64 [frequencies, num_mel_bins]."""
    low, high = (2595.0 * float(np.log10(1.0 + hz / 700.0)) for hz in (min_hz, max_hz))
    mels = np.linspace(low, high, num_mel_bins + 2)
    return _triangles(700.0 * (10.0 ** (mels / 2595.0) - 1.0), _frequencies(fft_size))


@lru_cache(2)
def _kaldi_filters(num_mel_bins: int, min_hz: float, max_hz: float) -> npt.NDArray[np.float64]:
    """Return filters that are triangles on Kaldi's mel scale, float64 [frequencies, num_mel_bins]."""

    def to_mel(hz: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return 1127.0 * np.log1p(np.asarray(hz, np.float64) / 700.0)

    corners = np.linspace(to_mel(min_hz), to_mel(max_hz), num_mel_bins + 2)
    return _triangles(corners, to_mel(_frequencies(_PAIRED_FFT)))


@lru_cache(4)
def _mel_filters(num_mel_bins: int, fft_size: int = WINDOW) -> Float32Array:
    """Return triangular filters of equal area on Slaney's mel scale, float32 [num_mel_bins, frequencies]."""
    top = _FIRST_LOG_MEL + np.log(_MAX_HZ / _FIRST_LOG_HZ) * _MELS_PER_E
    mels = np.linspace(0, top, num_mel_bins + 2)
    corners = np.where(
        mels < _FIRST_LOG_MEL,
        mels * _HZ_PER_MEL,
        _FIRST_LOG_HZ * np.exp((mels - _FIRST_LOG_MEL) / _MELS_PER_E),
    )
    filters = _triangles(corners, _frequencies(fft_size)) * (2 / (corners[2:] - corners[:-2]))
    return np.ascontiguousarray(filters.T, np.float32)
