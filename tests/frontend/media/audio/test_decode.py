"""Decoding and resampling of audio files."""

from __future__ import annotations

import io
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile
from engine.frontend.media.audio.arrays import AudioArray
from engine.frontend.media.audio.decode import AudioReader
from engine.frontend.media.audio.resample import Resampler
from engine.frontend.media.audio.windows import Windows
from engine.protocol.errors import ParameterError
from support.media.video_files import write_video

RATE = 16_000


def tone(rate: int, seconds: float = 2.0, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def audio_file(file_format: str, rate: int, subtype: str | None = None, channels: int = 1) -> bytes:
    samples = np.repeat(tone(rate)[:, None], channels, axis=1)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype=subtype)
    return file.getvalue()


def container_audio(
    file_format: str, codec: str, rate: int, channels: int = 1, **options: str
) -> bytes:
    """Return a tone in a file that FFmpeg writes. Skip the test without PyAV."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format=file_format, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        # The size of its frames is known once the encoder is open.
        stream.codec_context.open()
        samples = np.repeat(tone(rate)[None], channels, axis=0)
        frame = av.AudioFrame.from_ndarray(samples, "fltp", layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            stream.codec_context.format, layout, rate, stream.codec_context.frame_size
        )
        for each in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(each))
        container.mux(stream.encode(None))
    return file.getvalue()


def first_packets(data: bytes) -> bytes:
    """Return an MP4 file that ends after its fifth packet."""
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(data)) as container:
        packet = [packet for _, packet in zip(range(5), container.demux(), strict=False)][-1]
        return data[: packet.pos + packet.size]


def read_all(data: bytes, max_seconds: float = 60.0) -> np.ndarray:
    return np.concatenate(list(_pieces(AudioReader(data, "file", RATE, max_seconds))))


def _pieces(reader: AudioReader) -> Iterator[np.ndarray]:
    while len(piece := reader.read(1000)):
        yield piece


@pytest.mark.parametrize(
    ("file_format", "subtype", "rate", "channels", "error"),
    [
        ("WAV", "PCM_16", 22050, 1, 1e-4),
        ("WAV", "PCM_U8", 8000, 2, 0.02),
        ("WAV", "FLOAT", 44100, 1, 1e-5),
        ("FLAC", "PCM_24", 96000, 2, 1e-5),
        ("OGG", "VORBIS", 44100, 1, 0.05),
        ("OGG", "OPUS", 48000, 2, 0.05),
        ("MP3", None, 44100, 2, 0.05),
        ("AIFF", "PCM_16", 16000, 1, 1e-4),
    ],
)
def test_files_become_mono_samples_of_one_rate(
    file_format: str, subtype: str | None, rate: int, channels: int, error: float
) -> None:
    samples = read_all(audio_file(file_format, rate, subtype, channels))
    assert abs(len(samples) - 2 * RATE) <= 2
    inside = slice(RATE // 4, -RATE // 4)
    assert np.abs(samples - tone(RATE)[: len(samples)])[inside].max() < error


@pytest.mark.parametrize(
    ("file_format", "codec", "rate", "channels", "error"),
    [
        ("mp4", "aac", 44_100, 2, None),
        ("mp4", "alac", 48_000, 2, 1e-4),
        ("adts", "aac", 16_000, 1, None),
        ("webm", "libopus", 48_000, 1, 0.05),
        ("matroska", "libmp3lame", 22_050, 2, None),
        ("mov", "pcm_s24le", 48_000, 2, 1e-4),
        ("matroska", "pcm_s16le", 16_000, 1, 1e-4),
    ],
)
def test_audio_tracks_of_containers_are_read(
    file_format: str, codec: str, rate: int, channels: int, error: float | None
) -> None:
    samples = read_all(container_audio(file_format, codec, rate, channels))
    inside = slice(RATE // 4, -RATE // 4)
    if error is None:
        # These files do not say which of the first and last samples only fill blocks.
        assert 2 * RATE <= len(samples) < 2 * RATE + RATE // 8
        assert np.abs(samples)[inside].max() == pytest.approx(0.5, abs=0.05)
        return
    assert abs(len(samples) - 2 * RATE) <= RATE // 20
    assert np.abs(samples[: 2 * RATE] - tone(RATE)[: len(samples)])[inside].max() < error


def test_resampling_an_odd_rate_needs_little_memory() -> None:
    # The filter of this rate has almost 4000 columns. The whole matrix in float64 has 33 MB.
    tracemalloc.start()
    outputs = Resampler(4001, RATE).feed(np.zeros(4001, np.float32), is_end=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(outputs) == RATE and peak < 64 << 20


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101])
def test_resampling_in_pieces_keeps_what_both_rates_have(rate: int) -> None:
    random = np.random.default_rng(rate)
    low, high = tone(rate, 1.0), tone(rate, 1.0, 0.49 * rate)
    cuts = np.sort(random.integers(0, len(low), 7))

    def resample(samples: np.ndarray) -> np.ndarray:
        resampler = Resampler(rate, RATE)
        parts = [resampler.feed(part) for part in np.split(samples, cuts)]
        return np.concatenate([*parts, resampler.feed(samples[:0], is_end=True)])

    kept = resample(low)
    assert RATE <= len(kept) <= RATE + 1
    # An odd rate is off by less than a millionth, which moves the phase.
    limit = 1e-5 if rate != 44101 else 1e-2
    assert np.abs(kept[:RATE] - tone(RATE, 1.0))[800:-800].max() < limit
    if 0.49 * rate > RATE / 2:
        assert np.abs(resample(high))[800:-800].max() < 1e-4


WAV, FLAC, MP3 = (audio_file(name, 16_000) for name in ("WAV", "FLAC", "MP3"))
M4A = container_audio("mp4", "aac", 16_000)
M4A_HEADER_FIRST = container_audio("mp4", "aac", 16_000, moov_size="9999")


@pytest.mark.parametrize("riff_size", [0, 36, 0xFFFFFFFF])
def test_wav_file_written_to_a_pipe_is_read_to_its_end(riff_size: int) -> None:
    sizes = [riff_size.to_bytes(4, "little"), bytes(4)]
    data = WAV[:4] + sizes[0] + WAV[8:40] + sizes[1] + WAV[44:]
    assert (read_all(data) == read_all(WAV)).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be an audio file, got an empty one"),
        (b"hello world", "is not an audio file that can be read"),
        (WAV[: len(WAV) // 2], "is truncated: its header announces 64000 bytes of audio"),
        (WAV[:44], "is truncated: its header announces 64000 bytes of audio, but only 0 follow"),
        (FLAC[: len(FLAC) // 2], "is not an audio file that can be read"),
        (MP3[: len(MP3) // 2], "is truncated: its header announces"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "is not an audio file that can be read"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "is not an audio file that can be read"),
        (M4A[: len(M4A) // 2], "is not an audio file that can be read"),
        (first_packets(M4A_HEADER_FIRST), "is truncated: its header announces"),
        (write_video("mp4", "libx264", 3), "has no audio track"),
        (container_audio("matroska", "ac3", 48_000), "with the codec ac3; supported"),
        (audio_file("VOC", 16_000), "is of the format VOC, but must be one of wav, flac, mp3, ogg"),
        (audio_file("WAV", 1), "has a sample rate of 1 Hz, but it must be from 4000 to"),
        (audio_file("WAV", 16_000, channels=100), "has 100 channels, but at most 16 are allowed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_files_are_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        read_all(data)
    assert caught.value.param == "file"


def test_long_files_are_refused_before_they_are_decoded() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(600 * 4000, np.int16), 4000, format="FLAC")
    assert len(file.getvalue()) < 1 << 16
    with pytest.raises(ParameterError, match=r"is 600\.0 s long, but at most 300 s are allowed"):
        AudioReader(file.getvalue(), "file", RATE, 300)


@pytest.mark.slow
def test_wav_is_read_without_soundfile() -> None:
    program = (
        "import sys; sys.modules['soundfile'] = None\n"
        "from engine.frontend.media.audio.decode import AudioReader\n"
        "from engine.protocol.errors import ParameterError\n"
        "data = sys.stdin.buffer.read()\n"
        "try: print(len(AudioReader(data, 'file', 16000, 60).read(10 ** 6)))\n"
        "except ParameterError as error: print(error)\n"
    )

    def run(data: bytes) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout.decode()

    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32"):
        assert run(audio_file("WAV", 16_000, subtype, 2)) == "32000\n"
    assert "install the extra engine-serve[media]" in run(FLAC)


def test_windows_follow_each_other_and_are_cut_in_pauses() -> None:
    random = np.random.default_rng(1)
    loud = random.standard_normal(75 * RATE).astype(np.float32) * 0.1
    pauses = [(22.0, 22.2), (26.0, 26.6), (50.0, 50.5)]
    for start, end in pauses:
        loud[int(start * RATE) : int(end * RATE)] *= 0.01
    windows = Windows(AudioArray(loud), RATE, 30.0)
    found = list(iter(windows.next_window, None))
    assert [window.start for window in found] == [
        sum(len(before.samples) for before in found[:i]) for i in range(len(found))
    ]
    assert np.array_equal(np.concatenate([window.samples for window in found]), loud)
    cuts = [window.start / RATE for window in found[1:]]
    assert 26.0 < cuts[0] < 26.6
    assert 50.0 < cuts[1] < 50.5
    assert max(len(window.samples) for window in found) <= 30 * RATE
