"""Videos of models that read frames one by one are sampled, resized and put into prompts as by transformers."""

import ast
import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.frame_sampling import Sampling, sample_frames
from engine.frontend.media.layouts.frames import fit_frames
from engine.frontend.media.layouts.pixels import Tile, Video
from engine.frontend.media.layouts.single_frames import in_words, single_frames
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import text_section
from PIL import Image
from support.media.image_marks import GEMMA_MARKS, INTERNVL_MARKS, image_mark
from support.media.image_processors import image_processor
from support.vision.checkpoints import vision_directory
from transformers.models.gemma4_unified.processing_gemma4_unified import (
    get_aspect_ratio_preserving_size,
)
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

pytestmark = pytest.mark.slow
KINDS = ("smolvlm", "llava_onevision", "internvl", "internvl_chat")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    path, _ = vision_directory(tmp_path_factory.mktemp("model"), request.param)
    config = ConfigFields.read(path / "config.json")
    text = text_section(config)
    videos = read_video_processor(path, config, text, {})
    images = read_image_processor(path, config, text, {})
    return request.param, path, videos, PromptImages(images, load_tokenizer(path), videos)


def _frames(count, width, height):
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, height, width, 3), np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


def _functions(kind, *names):
    """Return functions and methods of the module of a video processor, whose class needs torchvision."""
    directory = Path(transformers.__file__).parent / "models" / kind
    tree = ast.parse((directory / f"video_processing_{kind}.py").read_text())
    known = {"np": np, "torch": torch, "VideoMetadata": VideoMetadata, "MAX_IMAGE_SIZE": 4096}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.returns = None
            exec(ast.unparse(node), known)
    return known


def _reference_sampler(kind, config):
    if kind == "llava_onevision":
        return default_sample_indices_fn
    most = config.max_frames if kind == "smolvlm" else None
    settings = SimpleNamespace(num_frames=most, fps=config.fps, initial_shift=True)
    return partial(_functions(kind, "sample_frames")["sample_frames"], settings)


def test_sampled_frames_equal_those_of_transformers(model):
    kind, _, config, _ = model
    kind = kind.removesuffix("_chat")
    sample = _reference_sampler(kind, config)
    rng = random.Random(2)
    for count in [*range(10, 40), *(rng.randrange(40, 4000) for _ in range(200))]:
        fps = rng.choice([1.0, 7.5, 10.0, 24.0, 29.97])
        metadata = VideoMetadata(total_num_frames=count, fps=fps, duration=count / fps)
        wanted = rng.randrange(1, min(count, config.max_frames) + 1)
        found = sample_frames(count, fps, config, Sampling(num_frames=wanted))
        assert found == sample(metadata, num_frames=wanted).tolist(), (count, fps, wanted)
        if kind == "smolvlm":
            found, expected = sample_frames(count, fps, config), sample(metadata)
        else:
            rate = rng.uniform(1.01 * fps / count, fps)
            found = sample_frames(count, fps, config, Sampling(fps=rate))
            expected = sample(metadata, fps=rate) if kind == "internvl" else None
            if expected is None:
                expected = default_sample_indices_fn(metadata, fps=rate)
        if len(found) < config.max_frames:
            assert found == expected.tolist(), (count, fps)
    # A file with fewer frames than the model reads is read as it is.
    if kind != "smolvlm":
        assert sample_frames(5, 1.0, config) == [0, 1, 2, 3, 4]


def test_frames_are_resized_as_by_transformers(model):
    kind, path, config, _ = model
    rng = random.Random(1)
    for _ in range(20):
        width, height = rng.randrange(1, 900), rng.randrange(1, 900)
        sizes = fit_frames(width, height, 3, config, 10**9)
        expected = [(64, 64)]
        if kind == "smolvlm":
            size = _functions(kind, "get_resize_output_image_size")["get_resize_output_image_size"]
            rows, columns = size(torch.empty(1, height, width), 256)
            expected.insert(0, (columns, rows))
        assert sizes == tuple(expected)
    frames = _frames(3, 50, 70)
    video = open_video(frames, Sampling(2.0), "v", config, partial(_fit, config))
    tiles = [part.payload for part in single_frames(video, config) if isinstance(part, Tile)]
    options = {"do_image_splitting": False} if kind == "smolvlm" else {}
    processor = image_processor(path, kind, **options)
    if kind == "llava_onevision":
        # Several images are not split, but get margins, which square frames do not need.
        square = [frame.resize((64, 64)) for frame in frames]
        expected = [
            processor([[frame, frame]], return_tensors="np")["pixel_values"][0][0]
            for frame in square
        ]
        video = video._replace(frames=square)
        tiles = [part.payload for part in single_frames(video, config) if isinstance(part, Tile)]
    elif kind.startswith("internvl"):
        processor.crop_to_patches = False
        expected = processor(frames, return_tensors="np")["pixel_values"]
    else:
        [expected] = processor([frames], return_tensors="np")["pixel_values"]
    for tile, pixels in zip(tiles, expected, strict=True):
        found = np.frombuffer(tile.pixels, np.uint8).reshape(64, 64, 3).astype(np.float64)
        found = (found * tile.scale - np.array(tile.mean)) / np.array(tile.std)
        np.testing.assert_allclose(found.transpose(2, 0, 1), pixels, rtol=0, atol=1e-6)


def _fit(config, width, height, num_frames):
    return fit_frames(width, height, num_frames, config, 1000)


def _expected_text(kind, video, config):
    """Return the text that replaces a video in a prompt of transformers' processor."""
    mark, kind = image_mark(kind.removesuffix("_chat")), kind.removesuffix("_chat")
    name = {"smolvlm": "SmolVLM", "llava_onevision": "LlavaOnevision", "internvl": "InternVL"}[kind]
    count = len(video.frames)
    state = SimpleNamespace(
        image_token=mark,
        video_token="<video>",
        start_image_token=INTERNVL_MARKS["start_image_token"],
        end_image_token=INTERNVL_MARKS["end_image_token"],
        image_seq_length=config.num_outputs,
        image_seq_len=config.num_outputs,
        num_image_tokens=64,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    metadata = VideoMetadata(1, fps=video.fps, frames_indices=video.numbers)
    pixels = np.empty((1, count, 1))
    inputs = {"pixel_values_videos": pixels, "pixel_values": pixels, "video_metadata": [metadata]}
    module = __import__(f"transformers.models.{kind}.processing_{kind}", fromlist=[name])
    module.num2words = {5: "five"}.get
    return getattr(module, f"{name}Processor").replace_video_token(state, inputs, 0)


def test_prompts_equal_those_of_transformers(model):
    kind, path, config, places = model
    video = open_video(_frames(5, 40, 24), Sampling(0.3), "v", config, partial(_fit, config))
    reader = MediaReader(places.reader_config)
    image = reader.prepare_image(_frames(1, 64, 64)[0])
    prepared = [image, reader.prepare_video(video)]
    expected = _expected_text(kind, video, config)
    prompt = f"a {image_mark(kind)} b <video> c"
    assert places.in_order(prompt, prepared[::-1]) == prepared
    found = places.expand(prompt, prepared)
    assert found == f"a {image.text} b {expected} c"
    token_ids = load_tokenizer(path).encode(found)
    inputs = places.inputs(token_ids, prepared)
    assert [item.num_tokens for item in inputs[-5:]] == [
        config.num_outputs + (config.is_pooled and index == 4) for index in range(5)
    ]
    covered = {item.position + i for item in inputs for i in range(item.num_tokens)}
    media = {places.reader_config.images.token_id, config.token_id}
    assert covered == {i for i, token in enumerate(token_ids) if token in media}


def test_smolvlm_prompt_states_the_length_of_the_video():
    config = SimpleNamespace(
        labels="times", start="<", end=">", num_outputs=1, side_factor=0, is_pooled=False, scale=1.0
    )
    config.mean = config.std = (1.0, 1.0, 1.0)
    video = Video(_frames(2, 1, 1), [30, 3690], 30.0, 1.0, 3723.9)
    texts = [part for part in single_frames(video, config) if isinstance(part, str)]
    assert texts == [
        "You are provided the following series of two frames from a 1:02:03 [H:MM:SS] video.\n",
        "\nFrame from 00:01:<",
        ">",
        "\nFrame from 02:03:<",
        ">",
        "\n\n",
    ]


def test_too_many_frames_are_refused(model):
    _, _, config, _ = model
    message = (
        rf"its 9 frames take {9 * config.num_outputs + config.is_pooled} tokens, and at most 9 fit"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_frames(64, 64, 9, config, 9)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (8, "eight"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (115, "one hundred and fifteen"),
        (1000, "one thousand"),
        (1024, "one thousand and twenty-four"),
        (1200, "one thousand, two hundred"),
    ],
)
def test_numbers_are_written_in_words(number, words):
    assert in_words(number) == words


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_frames_of_gemma4_keep_their_shape_and_follow_their_times(kind, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    config = ConfigFields.read(path / "config.json")
    text = text_section(config)
    videos = read_video_processor(path, config, text, {})
    rng = random.Random(2)
    for _ in range(50):
        count, wanted = rng.randrange(40, 4000), rng.randrange(1, 40)
        metadata = VideoMetadata(total_num_frames=count, fps=24.0)
        found = sample_frames(count, 24.0, videos, Sampling(num_frames=wanted))
        assert found == default_sample_indices_fn(metadata, num_frames=wanted).tolist()
        width, height = rng.randrange(1, 900), rng.randrange(1, 900)
        size = get_aspect_ratio_preserving_size(height, width, 8, 70 * 4, 2)
        assert fit_frames(width, height, 3, videos, 10**9) == (size[::-1],)
    metadata = VideoMetadata(total_num_frames=9000, fps=24.0, frames_indices=[0, 1500, 8000])
    names = {f"{name}_token": mark for name, mark in GEMMA_MARKS.items()} | {"video_token": "V"}
    expected = transformers.Gemma4Processor.replace_video_token(
        SimpleNamespace(**names),
        {"num_soft_tokens_per_video": [6], "video_metadata": [metadata]},
        0,
    )
    video = Video(_frames(3, 32, 48), [0, 1500, 8000], 24.0, 1.0, 375.0)
    parts = [
        "V" * part.num_outputs if isinstance(part, Tile) else part
        for part in single_frames(video, videos)
    ]
    assert "".join(parts) == expected
