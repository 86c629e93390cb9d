"""Speech is found by its power, whatever the noise."""

from __future__ import annotations

import numpy as np
import pytest
from engine.frontend.media.audio.speech_detector import SpeechDetector

RATE = 16_000


def noise(seconds: float, decibels: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return (samples * 10 ** (decibels / 20)).astype(np.float32)


def feed(detector: SpeechDetector, samples: np.ndarray, piece: int) -> list[tuple[bool, float]]:
    turns = []
    for start in range(0, len(samples), piece):
        turns += detector.feed(samples[start : start + piece])
    return [(turn.is_speech, turn.position / RATE) for turn in turns]


@pytest.mark.parametrize("background", [-200, -65, -50])
@pytest.mark.parametrize("piece", [160, 1000, 100_000])
def test_speech_between_pauses_is_found(background: float, piece: int) -> None:
    samples = noise(6, background)
    samples[2 * RATE : 3 * RATE] += noise(1, -20, 1)
    # A click is no speech.
    samples[RATE : RATE + 160] += noise(0.01, -6, 2)
    turns = feed(SpeechDetector(RATE, 0.5, 0.5), samples, piece)
    assert [is_speech for is_speech, _ in turns] == [True, False]
    assert turns[0][1] == pytest.approx(2, abs=0.03)
    assert turns[1][1] == pytest.approx(3.5, abs=0.05)


def test_a_higher_threshold_needs_louder_speech() -> None:
    samples = noise(4, -60)
    samples[2 * RATE : 3 * RATE] += noise(1, -40, 1)
    assert feed(SpeechDetector(RATE, 0.5, 0.5), samples, 320)
    assert not feed(SpeechDetector(RATE, 1.0, 0.5), samples, 320)


def test_short_pauses_do_not_end_speech() -> None:
    samples = noise(6, -60)
    for start in (1.0, 1.8, 2.6):
        at = round(start * RATE)
        samples[at : at + RATE // 2] += noise(0.5, -20, 1)
    turns = feed(SpeechDetector(RATE, 0.5, 0.5), samples, 320)
    assert [is_speech for is_speech, _ in turns] == [True, False]
    assert [is_speech for is_speech, _ in feed(SpeechDetector(RATE, 0.5, 0.1), samples, 320)] == [
        True,
        False,
    ] * 3


def test_steady_noise_is_speech_only_at_first() -> None:
    turns = feed(SpeechDetector(RATE, 0.5, 0.5), noise(12, -40), 320)
    assert [is_speech for is_speech, _ in turns] == [True, False]
    assert turns[1][1] < 8
