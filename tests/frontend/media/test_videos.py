"""Videos are sampled, resized and put into prompts as by transformers, and bad ones are refused."""

import ast
import base64
import io
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media import video_files
from engine.frontend.media.chat_images import ChatVideo, MediaLimits, make_video, take_media
from engine.frontend.media.frame_sampling import Sampling, sample_frames
from engine.frontend.media.layouts.frames import fit_frames, frames
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.config.videos import VideoProcessor
from engine.protocol.errors import ParameterError
from PIL import Image
from support.vision.qwen import END, IMAGE, START, UNIT, VIDEO, qwen_directory
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

pytestmark = pytest.mark.slow
QWEN2 = VideoProcessor(
    token_id=1, unit=28, frames_per_patch=2, min_pixels=128 * 28**2, max_pixels=768 * 28**2
)
QWEN3 = VideoProcessor(
    token_id=1,
    unit=32,
    frames_per_patch=2,
    min_pixels=4096,
    max_pixels=25165824,
    limits_whole=True,
    sampling="ends",
)


def _frames(count, width=20, height=20):
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, height, width, 3), np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


def _animation(count, file_format, duration=100, size=(20, 20)):
    first, *others = _frames(count, *size)
    file = io.BytesIO()
    options = {"lossless": True} if file_format == "WEBP" else {}
    first.save(file, file_format, save_all=True, append_images=others, duration=duration, **options)
    return file.getvalue()


def _jpegs(count, **size):
    files = []
    for frame in _frames(count, **size):
        file = io.BytesIO()
        frame.save(file, "JPEG")
        files.append(base64.b64encode(file.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(files)


def _same_size(width, height, num_frames):
    return ((width, height),)


GLM = {
    kind: msgspec.structs.replace(QWEN3, sampling=sampling, unit=28, max_frames=1024)
    for kind, sampling in (("glm4v", "seconds"), ("glm46v", "dynamic"))
}


@pytest.mark.parametrize("kind", ["glm4v", "glm46v"])
def test_sampled_frames_equal_those_of_transformers_glm(kind):
    sample = _glm_sampler(kind)
    rng = random.Random(1)
    lengths = [*range(1, 40), *(rng.randrange(40, 4000) for _ in range(100))]
    for count in lengths:
        fps = rng.choice([0.5, 1.0, 7.5, 10.0, 24.0, 29.97])
        metadata = SimpleNamespace(total_num_frames=count, fps=fps, duration=count / fps)
        # Transformers cannot read less than half a second.
        expected = sample(metadata).tolist() or [0, 0]
        assert sample_frames(count, fps, GLM[kind]) == expected, (count, fps)


def _glm_text(kind, video, num_outputs):
    """Return the text that replaces a video of three grids in a prompt of GLM."""
    processor = Glm4vProcessor if kind == "glm4v" else Glm46VProcessor
    state = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token=IMAGE)
    state.replace_frame_token_id = partial(processor.replace_frame_token_id, state)
    timestamps = [number / video.fps for number in video.numbers]
    inputs = {
        "video_grid_thw": np.array([[3, 2, 2 * num_outputs]]),
        "video_metadata": [SimpleNamespace(fps=video.fps, timestamps=timestamps)],
    }
    text = processor.replace_video_token(state, inputs, 0)
    return text.replace("<|begin_of_image|>", START).replace("<|end_of_image|>", END)


def _glm_sampler(kind):
    settings = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    return partial(_method(kind, "sample_frames"), settings)


def _method(kind, name):
    """Return the last method of this name in a module that needs torchvision."""
    directory = Path(transformers.__file__).parent / "models" / kind
    source = (directory / f"video_processing_{kind}.py").read_text()
    methods = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    method = [node for node in methods if node.name == name][-1]
    method.decorator_list = []
    for argument in method.args.args:
        argument.annotation = None
    names = {"np": np, "math": math}
    exec(ast.unparse(method), names)
    return names[name]


def test_frames_with_newlines_have_the_sizes_of_transformers():
    resize, sample = (_method("hy_v4_vl", name) for name in ("smart_resize", "sample_frames"))
    settings = SimpleNamespace(fps=2, min_frames=2, max_frames=1024)
    config = msgspec.structs.replace(
        QWEN3, frames_per_patch=1, max_pixels=1 << 20, max_frame_pixels=1 << 17, min_frames=2
    )
    config = msgspec.structs.replace(config, max_frames=1024)
    rng = random.Random(1)
    found = set()
    for _ in range(300):
        width, height, count = (
            rng.randrange(8, 1500),
            rng.randrange(8, 1500),
            rng.randrange(1, 50),
        )
        limits = {"max_pixels": config.max_pixels, "max_image_size": config.max_frame_pixels}
        rows, columns = resize(height, width, count, factor=config.unit, **limits)
        [size] = fit_frames(width, height, count, config, 10**9)
        assert size == (columns, rows), (width, height, count)
        num_outputs = (size[0] // config.unit + 1) * (size[1] // config.unit)
        assert num_outputs <= config.max_outputs
        found.add(size == (width // 32 * 32, height // 32 * 32))
        length, fps = rng.randrange(1, 3000), rng.choice([0.5, 7.5, 24.0, 29.97])
        metadata = SimpleNamespace(total_num_frames=length, fps=fps)
        assert sample_frames(length, fps, config) == sample(settings, metadata).tolist()
    # Some frames are shrunk, and others are not.
    assert found == {True, False}
    with pytest.raises(ValueError, match="one side may be at most 200 times as long"):
        fit_frames(10, 2010, 1, config, 10**9)


@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_sizes_and_sampled_frames_equal_those_of_transformers(config):
    rng = random.Random(1)
    for _ in range(300):
        width, height = rng.randrange(10, 3000), rng.randrange(10, 3000)
        count, fps = rng.randrange(2, 300), rng.choice([1.0, 7.5, 10.0, 24.0, 29.97, 60.0])
        reference = _qwen3 if config is QWEN3 else _qwen2
        size, numbers = reference(width, height, count, fps, config)
        assert fit_frames(width, height, count, config, 10**9) == (size,)
        assert sample_frames(count, fps, config) == numbers


def _qwen2(width, height, count, fps, config):
    """Return the size and the numbers of frames as in Qwen2VLVideoProcessor, which needs torchvision."""
    limits = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
    rows, columns = smart_resize(height, width, factor=config.unit, **limits)
    most = min(config.max_frames, count) // 2 * 2
    num_frames = math.floor(min(max(count / fps * 2, 4), most, count) / 2) * 2
    # Rounding may produce one additional number, which belongs to no frame.
    numbers = torch.arange(0, count, count / num_frames).int().clamp(max=count - 1)
    return (columns, rows), numbers.tolist()


def _qwen3(width, height, count, fps, config):
    """Return the size and the numbers of frames as in Qwen3VLVideoProcessor, which needs torchvision."""
    unit = config.unit
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    sides = [round(side / unit) * unit for side in (width, height)]
    counted = round(count / 2) * 2
    if counted * sides[0] * sides[1] > config.max_pixels:
        beta = math.sqrt(count * width * height / config.max_pixels)
        sides = [max(unit, math.floor(side / beta / unit) * unit) for side in (width, height)]
    elif counted * sides[0] * sides[1] < config.min_pixels:
        beta = math.sqrt(config.min_pixels / (count * width * height))
        sides = [math.ceil(side * beta / unit) * unit for side in (width, height)]
    num_frames = min(max(int(count / fps * 2), 4), 768, count)
    numbers = np.linspace(0, count - 1, num_frames).round().astype(int).tolist()
    return tuple(sides), numbers


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "lfm3_vl", "glm4v", "glm46v"])
def test_prompts_equal_those_of_transformers(kind, tmp_path):
    path, _ = qwen_directory(tmp_path, kind)
    config = ConfigFields.read(path / "config.json")
    text = config.section("text_config")
    videos = read_video_processor(path, config, text, {})
    places = PromptImages(
        read_image_processor(path, config, text, {}), load_tokenizer(path), videos
    )
    video = open_video(
        _frames(5, 40, 24),
        Sampling(3.0),
        "v",
        videos,
        lambda width, height, count: fit_frames(width, height, count, videos, 1000),
    )
    reader = MediaReader(places.reader_config)
    prepared = [reader.prepare_image(_frames(1, 40, 24)[0]), reader.prepare_video(video)]
    width, height = video.frames[0].size
    outputs = width * height // UNIT**2
    expected = VIDEO * (3 * outputs)
    own = {"qwen3_vl": Qwen3VLProcessor, "lfm3_vl": Lfm3VlProcessor}.get(kind)
    if own is not None:
        grid = np.array([[3, 2 * height // UNIT, 2 * width // UNIT]])
        state = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            video_token=VIDEO,
            vision_start_token=START,
            vision_end_token=END,
            _calculate_timestamps=lambda *given: own._calculate_timestamps(None, *given),
        )
        metadata = SimpleNamespace(fps=3.0, frames_indices=video.numbers)
        inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
        expected = own.replace_video_token(state, inputs, 0)
    elif kind.startswith("glm"):
        expected = _glm_text(kind, video, outputs)
    else:
        expected = f"{START}{expected}{END}"
    image = f"{START}{IMAGE * prepared[0].num_outputs}{END}"
    mark = VIDEO if kind.startswith("glm") else f"{START}{VIDEO}{END}"
    prompt = f"a {START}{IMAGE}{END} b {mark} c"
    found = places.expand(prompt, prepared)
    assert found == f"a {image} b {expected} c"
    token_ids = load_tokenizer(path).encode(found)
    inputs = places.inputs(token_ids, prepared)
    covered = {item.position + i for item in inputs for i in range(item.num_tokens)}
    media = {config.integer("image_token_id"), config.integer("video_token_id")}
    assert covered == {i for i, token in enumerate(token_ids) if token in media}
    # Two frames at 3 frames a second are 2/3 of a second, of which each has two positions.
    times = [(0, False), (1, True), (2, True)] if kind == "qwen2_5_vl" else [(0, False)] * 3
    assert [(item.grid.time, item.grid.continues) for item in inputs[1:]] == times
    assert places.in_order(prompt, prepared[::-1]) == prepared
    with pytest.raises(ParameterError, match="have 2 videos, but the prompt has 1 video tokens"):
        places.in_order(prompt, [prepared[1]] * 2)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_animations_are_sampled(file_format):
    video = open_video(_animation(9, file_format), Sampling(), "v", QWEN2, _same_size)
    # 0.9 seconds have fewer than the minimum of four frames.
    assert video.numbers == [0, 2, 4, 6]
    assert video.fps == pytest.approx(10)
    assert video.sampled_fps == pytest.approx(10 * 4 / 9)
    if file_format != "GIF":
        expected = [_frames(9)[number].tobytes() for number in video.numbers]
        assert [frame.tobytes() for frame in video.frames] == expected


def test_frames_are_given_as_files_images_and_arrays():
    images = _frames(3)
    array = np.stack([np.asarray(image) for image in images])
    for source in (images, make_video(array, "v").source):
        video = open_video(source, Sampling(), "v", QWEN2, _same_size)
        assert [frame.tobytes() for frame in video.frames] == [frame.tobytes() for frame in images]
        assert (video.numbers, video.fps, video.sampled_fps) == ([0, 1, 2], 2.0, 2.0)
    assert len(open_video(_jpegs(4), Sampling(5.0), "v", QWEN2, _same_size).frames) == 4
    parts = frames(video, QWEN2, ("", ""))
    assert [part.payload.num_frames for part in parts if isinstance(part, Tile)] == [2, 2]


def _long_animation(count):
    """Return a GIF with many frames of one pixel, without any of Pillow's memory."""
    header = b"GIF89a\1\0\1\0\x80\0\0" + bytes(3) + b"\xff" * 3
    frame = b"\x21\xf9\4\0\1\0\0\0\x2c" + bytes(4) + b"\1\0\1\0\0\2\2\x44\1\0"
    return header + frame * count + b";"


def _many():
    return _animation(30, "PNG", size=(60, 60))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_animation(4, "WEBP")[:-400], "is not a video that can be read"),
        (b"hello", "it is none of MP4, WebM, MKV, GIF, WEBP, PNG"),
        ("https://example.com/a.mp4", "must be a data URL"),
        ("data:video/jpeg;base64,a", "is not valid base64"),
        ("data:video/jpeg;base64,aGVsbG8=", "is not an image that can be read"),
        (_frames(2) + _frames(2, 30, 20), r"has frames of \(20, 20\) and \(30, 20\) pixels"),
        (_frames(1) * 769, "must have 1 to 768 frames, got 769"),
        (_frames(1, 8, 2000), "one side may be at most 200 times"),
        (_frames(9), "take 720 tokens, and at most 600 fit into the context"),
        (_long_animation(1_000_000), "has more than 4096 frames; send fewer"),
        (_many(), "is too large: its frames have 100800 pixels or more, and at most 100000 are"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_videos_are_refused_with_the_limit(source, message, monkeypatch):
    monkeypatch.setattr(video_files, "MAX_VIDEO_PIXELS", 100_000)

    def fit(width, height, num_frames):
        return fit_frames(width, height, num_frames, QWEN2, 600)

    with pytest.raises(ParameterError, match=message) as caught:
        open_video(source, Sampling(), "messages[0].content[1].video_url.url", QWEN2, fit)
    assert caught.value.param == "messages[0].content[1].video_url.url"


def test_video_parts_are_extracted_from_messages():
    limits = MediaLimits(max_images=1, max_videos=1)
    part = {"type": "video_url", "video_url": {"url": "data:x"}, "fps": 3}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]
    taken, media = take_media(messages, limits)
    assert taken[0]["content"][0] == {"type": "video"}
    assert media == [ChatVideo("data:x", "messages[0].content[0].video_url.url", Sampling(3))]
    image = {"type": "image_url", "image_url": {"url": "data:x"}, "detail": "low", "lang": "es"}
    taken, _ = take_media([{"role": "user", "content": [image]}], limits)
    assert taken[0]["content"][0] == {"type": "image", "lang": "es"}
    with pytest.raises(ParameterError, match="have 2 videos, but at most 1 are allowed"):
        take_media(messages * 2, limits)
    with pytest.raises(ParameterError, match="this model does not support videos"):
        take_media(messages, MediaLimits(1, None))
    for wrong in (
        {"fps": 0},
        {"fps": "2"},
        {"num_frames": 0},
        {"num_frames": 2},
        {"video_url": {"url": None}},
        {"video_url": [3]},
    ):
        content = [part | wrong]
        with pytest.raises(ParameterError, match=r"must (not )?be"):
            take_media([{"role": "user", "content": content}], limits)
