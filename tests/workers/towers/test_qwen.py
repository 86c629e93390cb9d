"""Qwen-VL and GLM models give the logits of transformers, with several images of any size and videos."""

import json
import random

import numpy as np
import pytest
import torch
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.layouts.frames import fit_frames, frames
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.encoder_inputs.inputs import EncoderGrid, EncoderInput
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import CheckpointError, EngineError
from engine.workers.batch.rotary_positions import RotaryPositions
from engine.workers.cpu.library import NotSupportedNatively
from PIL import Image
from safetensors.torch import load_file, save_file
from support.media.pictures import random_picture
from support.vision.qwen import (
    FRAMES,
    GLM_MODELS,
    IMAGE_MODELS,
    PATCH,
    QWEN_MODELS,
    UNIT,
    qwen_directory,
    qwen_image_processor,
    rotary_positions,
    video_patches,
)
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SIZES = ((100, 70), (20, 33))
NUM_FRAMES = 5


@pytest.fixture(scope="module", params=(*QWEN_MODELS, *GLM_MODELS, *IMAGE_MODELS))
def model(request, tmp_path_factory):
    return qwen_directory(tmp_path_factory.mktemp("model"), request.param)


def _grid(tile):
    return EncoderGrid(tile.payload.height // UNIT, tile.payload.width // UNIT)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load):
    kind = model[1].config.model_type
    if load is load_native_decoder and "Intern" in (model[0] / "config.json").read_text():
        with pytest.raises(NotSupportedNatively, match=r"sums of sines|experts that layers share"):
            load(model[0])
        return
    cases = [(SIZES, True)]
    if kind in IMAGE_MODELS:
        cases = [(SIZES, False)]
    elif kind.startswith("glm"):
        # Transformers' GLM does not read images and videos in one prompt.
        cases = [(SIZES, False), ((), True)]
    for images, has_video in cases:
        _check_logits(model, load, images, has_video)


def _check_logits(model, load, sizes, has_video):
    path, reference = model
    kind = reference.config.model_type
    decoder = load(path, max_model_len=512)
    config = read_model_config(path)
    text = config.section("text_config")
    images = [random_picture(*size, seed) for seed, size in enumerate(sizes)]
    processor = read_image_processor(path, config, text, {})
    videos = read_video_processor(path, config, text, {})
    groups = [process_image(image, processor) for image in images]
    if has_video:
        video = open_video(
            [random_picture(40, 24, seed) for seed in range(NUM_FRAMES)],
            Sampling(1.0),
            "v",
            videos,
            lambda *size: fit_frames(*size, videos, 1000),
        )
        groups.insert(1, frames(video, videos, ("", "")))
    else:
        groups.insert(1, process_image(images[1], processor))
    # Tokens around images have the experts of images.
    has_marks = kind == "ernie4_5_vl_moe"
    marks = [getattr(reference.config, f"image_{x}_token_id", None) for x in ("start", "end")]
    rng = random.Random(3)
    prompt, inputs, tiles, grids = [], [], [], []
    for number, group in enumerate(groups):
        prompt += [rng.randrange(4, 300) for _ in range(5)]
        if has_marks:
            prompt[-5:] = [marks[1], *prompt[-4:-1], marks[0]]
        is_video = has_video and number == len(groups) // 2
        token = videos.token_id if is_video else processor.token_id
        for part in group:
            if isinstance(part, Tile):
                size = part.num_outputs
                if part.grid is None:
                    # The decoder has no rotary positions.
                    part = part._replace(grid=_grid(part))
                inputs.append(EncoderInput(len(prompt), size, b"", size, b"", 0, part.grid))
                prompt += [token] * size
                tiles.append(part)
                if part.grid.continues:
                    grids[-1] = (grids[-1][0] + 1, *grids[-1][1:])
                else:
                    grids.append((1, part.grid.rows, part.grid.columns))
            elif part:
                # The time of a frame.
                prompt += [rng.randrange(4, 300) for _ in range(3)]
    prompt += [rng.randrange(4, 300) for _ in range(7)]
    arguments = {}
    if not has_video:
        images.insert(1, images[1])
    else:
        grid = inputs[len(sizes) // 2].grid
        grid_of_video = [-(-NUM_FRAMES // FRAMES), grid.rows * 2, grid.columns * 2]
        patches = video_patches(video.frames, videos.mean, videos.std)
        if kind == "hy_v4_vl":
            # Each frame is read like an image, whose rows end with one more embedding.
            grid_of_video = [NUM_FRAMES, grid.rows * 2, (grid.columns - 1) * 2]
            assert grid_of_video[1:] == [4, 8]
            patches = qwen_image_processor(path)(video.frames, return_tensors="pt")["pixel_values"]
        arguments["pixel_values_videos"] = patches
        arguments["video_grid_thw"] = torch.tensor([grid_of_video])
    if kind == "hunyuan_vl":
        is_image = torch.tensor([prompt]) == processor.token_id
        arguments["mm_token_type_ids"] = is_image.int()
    elif kind != "lfm3_vl":
        arguments["position_ids"] = rotary_positions(reference.config, prompt, grids)
    if has_marks:
        is_of_image = np.isin(prompt, [processor.token_id, *marks])
        arguments["moe_mm_token_type_ids"] = torch.from_numpy(is_of_image[None].astype(np.int32))
    if images:
        arguments |= qwen_image_processor(path)(images, return_tensors="pt")
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), **arguments).logits[0]

    tower = load_tower(path, decoder, load)
    encoded = torch.cat([tower(tile.payload) for tile in tiles])
    rotary = RotaryPositions(1, numbers_images=kind == "hunyuan_vl")
    rotary.add_request(0, inputs)
    media = [reference.config.image_token_id, reference.config.video_token_id]
    is_media = np.isin(prompt, media)
    runner = Runner(decoder, 1, max_tokens=512)
    # Chunks end within images and frames.
    ends = [17, 60, inputs[1].position + 3, inputs[2].position + 2, len(prompt) - 3]
    ends = sorted(end for end in ends if end < len(prompt))
    found = media_logits(runner, prompt, is_media, encoded, ends, rotary)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_grids_and_pixels_equal_those_of_transformers(model):
    path, _ = model
    config = read_model_config(path)
    processor = read_image_processor(path, config, config.section("text_config"), {})
    for width, height in ((3, 40), (40, 5), (7, 7), (8, 9), (64, 64), (33, 400), (300, 290)):
        image = random_picture(width, height, 1)
        [tile] = [part for part in process_image(image, processor) if isinstance(part, Tile)]
        found = qwen_image_processor(path)(image, return_tensors="pt")
        resized = Image.frombytes(
            "RGB", (tile.payload.width, tile.payload.height), tile.payload.pixels
        )
        patches = video_patches([resized], processor.mean, processor.std)
        frames = found["pixel_values"]
        if config.text("model_type") == "cosmos3_edge":
            # The values of a pixel are next to each other.
            frames = frames.view(len(patches), -1, 3).transpose(1, 2).contiguous()
        frames = frames.view(len(patches), 3, -1, PATCH**2)
        patches = patches.view(len(patches), 3, FRAMES, -1)[:, :, : frames.shape[2]]
        # Transformers' patches may be in the order of rows.
        both = (each.flatten(1).sort(0).values for each in (frames, patches))
        torch.testing.assert_close(*both, rtol=0, atol=0)
        grid = _grid(tile)
        assert tile.num_outputs == (tile.grid or grid).num_tokens
        expected = [1, 2 * grid.rows, 2 * grid.columns]
        assert found["image_grid_thw"].tolist() == [expected], (width, height)


def test_images_that_do_not_fit_the_patches_are_refused(model):
    path, _ = model
    decoder = load_decoder(path, max_model_len=512)
    tower = load_tower(path, decoder)
    ones = (1.0, 1.0, 1.0)
    with pytest.raises(EngineError, match="has 1 frames of 8 x 4 pixels, but the model reads"):
        tower(ImagePayload(8, 4, bytes(96), 1 / 255, ones, ones))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deepstack_visual_indexes", [1, 2, 1], "must be different indices of the 4 layers"),
        ("hidden_size", 40, "must be a multiple of 4 times num_heads 4"),
    ],
)
def test_towers_that_cannot_be_computed_are_refused(name, value, message, tmp_path):
    path, _ = qwen_directory(tmp_path, "qwen3_vl")
    config = json.loads((path / "config.json").read_text())
    config["vision_config"][name] = value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_decoder(path)


def test_alpamayo_is_the_model_in_its_config_and_writes_no_trajectories(tmp_path):
    path, reference = qwen_directory(tmp_path, "qwen3_vl")
    config = json.loads((path / "config.json").read_text())
    published = {
        "architectures": ["Alpamayo2Super"],
        "model_type": "alpamayo2_super",
        "vlm_config": config,
        "traj_ids": {"history_id0": 20, "future_id0": 23},
        "history_vocab_size": 3,
        "future_vocab_size": 4,
        "min_pixels": 4 * UNIT**2,
        "max_pixels": 9 * UNIT**2,
    }
    (path / "config.json").write_text(json.dumps(published))
    file = path / "model.safetensors"
    stored = {f"vlm.{name}": tensor for name, tensor in load_file(file).items()}
    expert = {"expert.layers.0.self_attn.q_proj.weight": torch.zeros(1, 1)}
    save_file(stored | expert | {"expert.embed_tokens.weight": torch.zeros(1, 1)}, file)
    known = read_model_config(path)
    processor = read_image_processor(path, known, known.section("text_config"), {})
    limits = processor.min_pixels, processor.max_pixels
    assert limits == (4 * UNIT**2, 9 * UNIT**2)
    prompt = [1, 21, 5, 9, 25, 3]
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0]
    for load in (load_decoder, load_native_decoder):
        found = Runner(load(path, max_model_len=64), 1, max_tokens=64).step({0: prompt})[0].clone()
        assert found[:, 20:27].max() < -1e20
        found[:, 20:27] = expected[:, 20:27]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        load_tower(path, load(path, max_model_len=64)).warm_up()
