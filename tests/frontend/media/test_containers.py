"""MP4, WebM and Matroska files are sampled like animations, and bad ones are refused."""

import base64
import io
import math
import sys

import numpy as np
import pytest
from engine.frontend.media import containers, video_files
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.video_files import open_video
from engine.protocol.config.videos import VideoProcessor
from engine.protocol.errors import ParameterError
from support.media.video_files import FPS, brightness, write_video

av = pytest.importorskip("av")

QWEN2 = VideoProcessor(token_id=1, unit=28, frames_per_patch=2, min_pixels=1, max_pixels=1 << 20)
QWEN3 = VideoProcessor(
    token_id=1, unit=32, frames_per_patch=2, min_pixels=1, max_pixels=1 << 20, sampling="ends"
)
FILES = (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("matroska", "mpeg4"))


def write_clip():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def shown_numbers(video, count):
    """Return the numbers of a video's frames, which their brightness encodes."""
    levels = np.array([brightness(number, count) for number in range(count)])
    means = [np.asarray(frame).mean() for frame in video.frames]
    return [int(np.abs(levels - mean).argmin()) for mean in means]


def same_size(width, height, num_frames):
    return ((width, height),)


@pytest.mark.parametrize("container", FILES, ids=lambda value: value[0])
@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_files_are_sampled_by_rate_and_count(container, config):
    data = write_video(*container, 45)
    for sampling in (Sampling(), Sampling(fps=5.0), Sampling(num_frames=6)):
        video = open_video(data, sampling, "v", config, same_size)
        count = sampling.num_frames or math.floor(4.5 * (sampling.fps or config.fps))
        if config is QWEN2:
            count = count // 2 * 2
            assert video.numbers == [int(np.float32(i * 45 / count)) for i in range(count)]
        else:
            assert video.numbers == np.linspace(0, 44, count).round().astype(int).tolist()
        assert len(video.frames) == count
        assert shown_numbers(video, 45) == video.numbers
        assert video.frames[0].size == (64, 48)
        assert video.fps == pytest.approx(FPS)
        assert video.sampled_fps == pytest.approx(count / 4.5)


def test_distant_video_frames_are_read_without_converting_those_between():
    data = write_video("mp4", "libx264", 200)
    shown = []
    track, frames = containers.read_container(
        data, "v", lambda track: [3, 150], lambda frame: shown.append(1) or frame, lambda: None
    )
    assert track == (200, FPS, 64, 48)
    assert len(frames) == len(shown) == 2
    levels = [np.asarray(frame).mean() for frame in frames]
    assert levels == pytest.approx([brightness(3, 200), brightness(150, 200)], abs=3)


def test_data_urls_of_files_are_read():
    content = base64.b64encode(write_video("mp4", "libx264", 20)).decode()
    url = f"data:video/mp4;base64,{content}"
    assert len(open_video(url, Sampling(), "v", QWEN2, same_size).frames) == 4


def _damaged():
    data = bytearray(write_video("mp4", "libx264", 40))
    start = data.index(b"mdat") + 4
    data[start : start + 600] = bytes(600)
    return bytes(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: write_video("mp4", "libx264", 20)[:700], "is not a video that can be read"),
        (lambda: b"\0\0\0\x1cftypisom", "is not a video that can be read"),
        (lambda: b"\x1a\x45\xdf\xa3" + bytes(100), "is not a video that can be read"),
        (_damaged, "is (damaged|not a video that can be read)"),
        (write_clip, "has no video track"),
        (
            lambda: write_video("matroska", "ffv1", 3),
            "with the codec ffv1; supported codecs are H.264",
        ),
        (lambda: write_video("mp4", "libx264", 3, (320, 240)), "of 320 x 240 pixels, and at most"),
        (lambda: write_video("mp4", "libx264", 130), "has more than 120 frames"),
        (lambda: write_video("mp4", "libx264", 110), "takes 11 s, and at most 10 s"),
    ],
)
def test_bad_files_are_refused_with_the_limit(make, message, monkeypatch):
    monkeypatch.setattr(containers, "MAX_FRAME_PIXELS", 10_000)
    monkeypatch.setattr(containers, "MAX_FRAMES", 120)
    monkeypatch.setattr(containers, "MAX_SECONDS", 10)
    with pytest.raises(ParameterError, match=message) as caught:
        open_video(make(), Sampling(), "messages[0].content[1].video_url.url", QWEN2, same_size)
    assert caught.value.param == "messages[0].content[1].video_url.url"


def test_video_decoding_is_stopped_at_its_time_limit(monkeypatch):
    monkeypatch.setattr(video_files, "TIMEOUT_S", -1.0)
    data = write_video("mp4", "libx264", 20)
    with pytest.raises(ParameterError, match="takes more than -1 s to decode"):
        open_video(data, Sampling(), "v", QWEN2, same_size)


def test_files_without_the_extra_are_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        ParameterError, match=r"without PyAV: install the extra engine-serve\[media\]"
    ):
        open_video(b"\0\0\0\x1cftypisom", Sampling(), "v", QWEN2, same_size)
