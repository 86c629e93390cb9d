"""The input audio of realtime sessions: formats, and where utterances begin and end."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from engine.frontend.api.realtime.audio import FORMATS, PCM, InputBuffer
from engine.frontend.api.schema.realtime import TurnDetection
from engine.frontend.http.errors import APIError
from support.requests.realtime import to_pcm

RATE = 16_000
DETECTION = TurnDetection(threshold=0.5, prefix_padding_ms=200, silence_duration_ms=400)


def buffer_of(
    detection: TurnDetection | None = None, rate: int = RATE, max_s: float = 60
) -> InputBuffer:
    buffer = InputBuffer(RATE, int(max_s * RATE))
    buffer.configure(PCM, rate, detection)
    return buffer


@pytest.mark.parametrize(("name", "subtype"), [("audio/pcmu", "ULAW"), ("audio/pcma", "ALAW")])
def test_g711_is_decoded_as_libsndfile_does(name: str, subtype: str) -> None:
    codes = bytes(range(256))
    raw = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": subtype}
    expected, _ = soundfile.read(io.BytesIO(codes), dtype="float32", **raw)
    assert np.array_equal(FORMATS[name].decode(codes), expected)


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_audio_in_pieces_is_the_same_as_in_one(rate: int) -> None:
    data = to_pcm(0.3 * np.random.default_rng(0).standard_normal(rate))
    whole, pieces = buffer_of(rate=rate), buffer_of(rate=rate)
    whole.append(data)
    for start in range(0, len(data), 1000):
        pieces.append(data[start : start + 1000])
    committed = whole.commit()
    assert np.allclose(committed, pieces.commit(), atol=1e-6) and len(committed) == RATE
    assert not len(whole.commit()) and not whole.num_samples


def test_utterances_have_the_padding_before_them_and_silence_is_dropped() -> None:
    rng = np.random.default_rng(0)
    samples = 0.0005 * rng.standard_normal(10 * RATE)
    for start in (2, 6):
        samples[start * RATE : (start + 1) * RATE] += 0.1 * rng.standard_normal(RATE)
    data = to_pcm(samples)
    buffer = buffer_of(DETECTION)
    found = []
    for start in range(0, len(data), 3200):
        found += buffer.append(data[start : start + 3200])
        assert buffer.num_samples < 2 * RATE
    assert [each.utterance is None for each in found] == [True, False] * 2
    positions = [each.position / RATE for each in found]
    assert positions == pytest.approx([1.8, 3.4, 5.8, 7.4], abs=0.04)
    for begun, ended in zip(found[::2], found[1::2], strict=True):
        expected = samples[begun.position : ended.position]
        assert np.allclose(ended.utterance, expected, atol=1e-4)


def test_a_full_buffer_and_half_samples_are_refused() -> None:
    buffer = buffer_of(max_s=1)
    assert buffer.verify_room(2 * RATE) == RATE
    with pytest.raises(APIError, match="at most 1 s"):
        buffer.verify_room(2 * RATE + 2)
    with pytest.raises(APIError, match="2 bytes per sample, got 3 bytes"):
        buffer.verify_room(3)
