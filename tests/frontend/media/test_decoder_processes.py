"""Media are decoded in processes that may be lost, with the same results as in the caller's."""

from __future__ import annotations

import base64
import io
import signal
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import pytest
import soundfile
from engine.frontend.media.audio.decode import AudioReader
from engine.frontend.media.decoding.limits import DecoderLimits
from engine.frontend.media.decoding.messages import OpenAudio
from engine.frontend.media.decoding.processes import MediaProcesses
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.media_reader import MediaReader, ReaderConfig
from engine.protocol.config.images.sized import ResizeProcessor
from engine.protocol.config.videos import VideoProcessor
from engine.protocol.errors import ParameterError, UnavailableError
from PIL import Image
from support.media.image_requests import data_url, picture
from support.media.video_files import write_video
from support.processes.faults import exhaust_memory
from support.processes.waiting import eventually, is_running

pytestmark = pytest.mark.slow

WHERE = "messages[0].content[1].image_url.url"
CONFIG = ReaderConfig(
    ResizeProcessor(
        token_id=1,
        output_size=8,
        num_outputs=64,
        resample=3,
        unit=28,
        min_pixels=784,
        max_pixels=78400,
    ),
    VideoProcessor(token_id=2, unit=28, frames_per_patch=2, min_pixels=784, max_pixels=78400),
    "<image>",
    "<video>",
    ("", ""),
    1024,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[MediaProcesses]:
    with closing(MediaProcesses(CONFIG)) as pool:
        yield pool


@contextmanager
def limited(**limits: Any) -> Iterator[MediaProcesses]:
    with closing(MediaProcesses(CONFIG, DecoderLimits(**limits))) as pool:
        yield pool


def file_of(image: Image.Image, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, file_format)
    return file.getvalue()


def slow_file() -> bytes:
    """Return an image that takes some tenths of a second to decode."""
    return file_of(Image.new("L", (8000, 6000), 7).convert("RGB"))


def audio_file(num_samples: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(num_samples) ** 1.1 / 9), 22_050, format="FLAC")
    return file.getvalue()


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def decoders(others: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the processes that decode, except `others` and those that fork them."""
    return [
        child
        for server in psutil.Process().children()
        # Servers of other tests may run, too.
        if is_fork_server(server)
        for child in children_of(server)
        if child not in others
    ]


def children_of(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "media decoder fork server" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def only_decoder() -> psutil.Process:
    """Return the only decoder process, once exiting processes have exited."""
    assert eventually(lambda: len(decoders()) == 1)
    return decoders()[0]


def outcome(read: Any, *args: Any) -> Any:
    try:
        return read(*args)
    except ParameterError as error:
        return str(error)


@pytest.mark.parametrize(
    "source",
    [
        file_of(picture(1, 90, 60)),
        data_url(picture(2, 60, 90), "JPEG"),
        file_of(picture(3, 90, 60))[:900],
        b"",
        "data:image/png;base64,\ud800",
        "https://example.com/a.png",
        bomb(),
    ],
    ids=["png", "data URL", "truncated", "empty", "no base64", "no data", "bomb"],
)
def test_images_are_read_or_refused_as_in_the_same_process(
    pool: MediaProcesses, source: str | bytes
) -> None:
    expected = outcome(MediaReader(CONFIG).read_image, source, WHERE, 1)
    assert outcome(pool.read_image, source, WHERE, 1) == expected
    assert not isinstance(expected, str) or expected.startswith(WHERE)


@pytest.mark.parametrize("file_format", ["AVIF", "PPM"])
def test_rarer_files_have_the_pixels_that_pillow_reads(
    pool: MediaProcesses, file_format: str
) -> None:
    file = file_of(picture(5, 60, 44), file_format)
    decoded = Image.open(io.BytesIO(file)).convert("RGB")
    expected = MediaReader(CONFIG).read_image(decoded, WHERE, 1)
    assert pool.read_image(file, WHERE, 1) == expected


def test_videos_are_read_or_refused_as_in_the_same_process(pool: MediaProcesses) -> None:
    film = write_video("mp4", "mpeg4", 12)
    jpegs = [base64.b64encode(file_of(picture(i, 60, 60), "JPEG")).decode() for i in range(3)]
    for source in (
        film,
        film[: len(film) // 2],
        film[:60],
        [f"data:image/jpeg;base64,{jpeg}" for jpeg in jpegs],
        "data:video/jpeg;base64," + ",".join(jpegs),
        [],
    ):
        for sampling in (Sampling(), Sampling(num_frames=2)):
            expected = outcome(MediaReader(CONFIG).read_video, source, sampling, WHERE)
            assert outcome(pool.read_video, source, sampling, WHERE) == expected


def test_audio_is_read_in_pieces_or_refused(pool: MediaProcesses) -> None:
    data = audio_file(30_000)

    def read(open_audio: Any) -> Any:
        clip = open_audio()
        pieces = [clip.read(9000)]
        while len(pieces[-1]) >= 9000:
            pieces.append(clip.read(9000))
        return [piece.tobytes() for piece in pieces]

    for given, seconds in ((data, 60.0), (data[:3000], 60.0), (data, 1.0), (b"RIFF", 60.0)):
        expected = outcome(read, lambda g=given, s=seconds: AudioReader(g, "file", 16_000, s))
        opening = OpenAudio("file", 16_000, seconds)
        assert outcome(read, lambda g=given, o=opening: pool.open_audio(g, o)) == expected
    process = only_decoder()
    with closing(pool.open_audio(data, OpenAudio("file", 16_000, 60.0))) as clip:
        clip.read(10)
    assert eventually(lambda: not is_running(process.pid))


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_crash_fails_its_own_request_and_no_other(
    pool: MediaProcesses, signum: signal.Signals
) -> None:
    source, slow = file_of(picture(1, 90, 60)), slow_file()
    expected = pool.read_image(source, WHERE, 1)

    def crash() -> object:
        process = only_decoder()
        with ThreadPoolExecutor(2) as threads:
            crashed = threads.submit(outcome, pool.read_image, slow, WHERE, 1)
            # The process has the slow image, so the other one goes to another.
            assert eventually(lambda: bool(process.cpu_percent()) or crashed.done())
            other = threads.submit(pool.read_image, source, WHERE, 1)
            process.send_signal(signum)
            assert other.result() == expected
            assert eventually(lambda: not is_running(process.pid))
            return crashed.result()

    problem = f"cannot be decoded: it crashes the decoder ({signum.name}); send another file"
    assert crash() == f"{WHERE} {problem}"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_file_outlives_a_decoder_but_not_several(signum: signal.Signals) -> None:
    """It may be the file that kills its process, so it gets only a few."""
    others, source = decoders(), slow_file()
    with limited() as pool, ThreadPoolExecutor(1) as threads:
        undisturbed = outcome(pool.read_image, source, WHERE, 1)

        def harm_decoders(number: int) -> object:
            read = threads.submit(outcome, pool.read_image, source, WHERE, 1)
            harmed: list[int] = []
            while len(harmed) < number and not read.done():
                busy = [each for each in decoders(others) if each.pid not in harmed]
                for process in busy:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signum)
                        harmed.append(process.pid)
            return read.result()

        assert harm_decoders(1) == undisturbed
        assert eventually(lambda: "cannot be decoded: its process was" in str(harm_decoders(100)))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_fork_server_is_replaced(signum: signal.Signals) -> None:
    others, data = decoders(), audio_file(30_000)
    with limited() as pool, closing(pool.open_audio(data, OpenAudio("file", 16_000, 60.0))) as clip:
        [child] = decoders(others)
        parent = child.parent()
        assert parent is not None
        for process in (parent, child):
            process.send_signal(signum)
        assert len(clip.read(1000)) >= 1000
        assert eventually(lambda: not is_running(child.pid))
        assert pool.read_image(file_of(picture(1, 30, 30)), WHERE, 1).num_outputs == 1
        last = decoders(others)
    for process in last:
        assert eventually(lambda pid=process.pid: not is_running(pid))


def test_a_file_without_a_process_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(picture(1, 30, 30))
    with limited() as pool:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/removed/python")
            with pytest.raises(UnavailableError, match=r"to read messages\[0\].*; retry later"):
                pool.read_image(file, WHERE, 1)
        assert pool.read_image(file, WHERE, 1).num_outputs == 1


def test_a_clip_outlives_its_process_between_pieces(pool: MediaProcesses) -> None:
    data = audio_file(1_000_000)
    sizes = (100_000, 5_000, 500_000, 900_000)
    opening = OpenAudio("file", 16_000, 60.0)
    reader = AudioReader(data, "file", 16_000, 60.0)
    expected = b"".join(reader.read(size).tobytes() for size in sizes)
    with closing(pool.open_audio(data, opening)) as clip:
        read = [clip.read(sizes[0]).tobytes()]
        for size in sizes[1:3]:
            for process in decoders():
                process.kill()
            read.append(clip.read(size).tobytes())
        read.append(clip.read(sizes[3]).tobytes())
    assert b"".join(read) == expected


def test_a_fork_server_without_memory_does_not_limit_its_processes() -> None:
    others = decoders()
    with limited() as pool:
        expected = pool.read_image(file_of(picture(1, 30, 30)), WHERE, 1)
        [child] = decoders(others)
        parent = child.parent()
        assert parent is not None
        exhaust_memory(parent)
        child.kill()
        assert pool.read_image(file_of(picture(1, 30, 30)), WHERE, 1) == expected


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (
            {"cpu_s": 0.05},
            "takes more than 0.05 s of processor time to decode; send a smaller file",
        ),
        ({"wall_s": 0.05}, "takes more than 0.05 s to decode; send a smaller file"),
        (
            {"memory_bytes": 32 << 20},
            "needs more than 32 MiB of memory to decode; send a smaller file",
        ),
    ],
)
def test_a_file_over_a_limit_is_refused(limits: dict[str, Any], problem: str) -> None:
    with limited(**limits) as pool:
        with pytest.raises(ParameterError) as caught:
            pool.read_image(slow_file(), WHERE, 1)
        assert str(caught.value) == f"{WHERE} {problem}"
        # On a busy machine, a small file may also take that long.
        small = file_of(picture(1, 30, 30))
        assert eventually(lambda: not isinstance(outcome(pool.read_image, small, WHERE, 1), str))
