"""Log-mel features against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from engine.frontend.media.audio.log_mel import (
    EMPHASIZED,
    LEADING,
    ClipFrames,
    clip_log_mel,
    log_mel,
    normed_log_mel,
    paired_log_mel,
)
from support.audio.sizes import NUM_MEL_BINS
from support.media.audio_features import granite_features
from transformers import (
    CohereAsrFeatureExtractor,
    Gemma3nAudioFeatureExtractor,
    Gemma4AudioFeatureExtractor,
    ParakeetFeatureExtractor,
    WhisperFeatureExtractor,
)

WINDOW = 480_000


@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize("num_samples", [1, 399, 16_000, 58_001, 479_679, 479_900, WINDOW])
def test_features_equal_those_of_transformers(num_mel_bins: int, num_samples: int) -> None:
    random = np.random.default_rng(num_samples)
    envelope = np.abs(np.sin(np.arange(num_samples) / 3000))
    samples = (0.2 * random.standard_normal(num_samples) * envelope).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=num_mel_bins)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    found = log_mel(samples, WINDOW, num_mel_bins)
    assert found.shape == expected.shape == (num_mel_bins, 3000)
    assert found.dtype == np.float32
    # Both round differently, especially if a frame is nearly silent.
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert np.abs(found - expected).mean() < 1e-5


@pytest.mark.parametrize("num_samples", [160, 319, 16_000, 58_161])
def test_features_of_pairs_equal_those_of_transformers(num_samples: int) -> None:
    random = np.random.default_rng(num_samples)
    # The second half is silent, so that values are limited by the maximum.
    samples = (0.2 * random.standard_normal(num_samples)).astype(np.float32)
    samples[num_samples // 2 :] = 0
    expected = granite_features(samples, NUM_MEL_BINS).numpy().T
    found = paired_log_mel(samples, 2 * NUM_MEL_BINS)
    assert found.shape == expected.shape == (2 * NUM_MEL_BINS, (num_samples // 160 + 1) // 2)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("num_samples", [700, 16_000, 16_001, 58_161, WINDOW])
@pytest.mark.parametrize(
    ("frames", "extractor"),
    [(EMPHASIZED, Gemma3nAudioFeatureExtractor), (LEADING, Gemma4AudioFeatureExtractor)],
)
def test_features_of_clips_equal_those_of_transformers(
    frames: ClipFrames, extractor: type, num_samples: int
) -> None:
    samples = 0.2 * np.random.default_rng(num_samples).standard_normal(num_samples)
    samples[num_samples // 2 :] = 0
    expected = extractor()([samples.astype(np.float32)], return_tensors="np")
    features = expected["input_features"][0][expected["input_features_mask"][0]].T
    found = clip_log_mel(frames, samples.astype(np.float32), 128)
    assert found.shape == features.shape
    np.testing.assert_allclose(found, features, atol=1e-4)
    assert np.abs(found - features).mean() < 1e-6


def test_clips_shorter_than_a_frame_have_no_features() -> None:
    for frames in (EMPHASIZED, LEADING):
        assert clip_log_mel(frames, np.ones(100, np.float32), 128).shape == (128, 0)


@pytest.mark.parametrize("num_samples", [320, 16_000, 58_163, WINDOW])
def test_normed_features_equal_those_of_transformers(num_samples: int) -> None:
    samples = 0.2 * np.random.default_rng(num_samples).standard_normal(num_samples)
    # Silence has only the noise that is added.
    samples[num_samples // 2 :] = 0
    for extractor, has_dither in (
        (CohereAsrFeatureExtractor(), True),
        (ParakeetFeatureExtractor(feature_size=128), False),
    ):
        expected = extractor(samples.astype(np.float32), sampling_rate=16_000, return_tensors="np")
        features = expected["input_features"][0][expected["attention_mask"][0]].T
        found = normed_log_mel(samples.astype(np.float32), 128, has_dither=has_dither)
        assert found.shape == features.shape == (128, num_samples // 160)
        np.testing.assert_allclose(found, features, atol=1e-3)
        assert np.abs(found - features).mean() < 1e-5
