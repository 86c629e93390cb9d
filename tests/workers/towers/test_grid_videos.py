"""Models whose decoder has one position a token give the logits of transformers for videos."""

import ast
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.layouts.frames import fit_frames, frames
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.videos import read_video_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.workers.towers.pixels import normalized_pixels
from PIL import Image
from support.own_code.own_towers.ovis2_5 import ovis2_5
from support.vision.grid_configs import IMAGE_TOKEN, PATCH
from support.vision.grid_models import write_grid_model
from support.workers.decoders import CPU, Runner, load_native_decoder
from support.workers.towers import load_tower, media_logits
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3Processor,
)
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
HALF = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}


def _open(count, size, config):
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, *size[::-1], 3), np.uint8)
    images = [Image.fromarray(frame) for frame in pixels]
    return open_video(
        images, Sampling(3.0), "v", config, lambda *sizes: fit_frames(*sizes, config, 1000)
    )


def _function(kind, name):
    """Return a function of transformers' video processor, whose module needs torchvision."""
    directory = Path(transformers.__file__).parent / "models" / kind
    tree = ast.parse((directory / f"video_processing_{kind}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    [function] = [node for node in functions if node.name == name]
    names = {"math": math, "torch": torch}
    exec(ast.unparse(function), names)
    return names[name]


def _check_logits(path, prompt, token_id, tiles, expected):
    """Compare the logits of a prompt, whose placeholders are `token_id`, with `expected` [T, V]."""
    decoder = load_native_decoder(path, max_model_len=1024)
    tower = load_tower(path, decoder, load_native_decoder)
    encoded = torch.cat([tower(tile.payload) for tile in tiles])
    is_placed = np.array(prompt) == token_id
    found = media_logits(Runner(decoder, 1, max_tokens=1024), prompt, is_placed, encoded, [9])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keeps_shape", [True, False])
def test_tubelets_of_nemotron_equal_those_of_transformers(tmp_path, keeps_shape):
    reference = write_grid_model(tmp_path, "nemotron_h_omni")
    fields = {"video_target_num_patches": 30, "video_maintain_aspect_ratio": keeps_shape}
    processor = HALF | fields | {"patch_size": PATCH}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(processor))
    config = ConfigFields.read(tmp_path / "config.json")
    videos = read_video_processor(tmp_path, config, config.section("text_config"), {})
    method = _function("nemotron_h_omni", "_compute_target_patches")
    size_of = partial(method, SimpleNamespace(_downsample_factor=2, **fields))
    for size in ((30, 21), (7, 70), (90, 40), (300, 17), (64, 64)):
        assert fit_frames(*size, 1, videos, 1000) == (
            tuple(PATCH * side for side in size_of(*size[::-1])),
        )

    video = _open(5, (30, 21), videos)
    parts = frames(video, videos, (videos.start, videos.end))
    tiles = [part for part in parts if isinstance(part, Tile)]
    tubelets = torch.stack(
        [normalized_pixels(tile.payload, CPU, torch.float32).flatten(0, 1) for tile in tiles]
    )
    state = SimpleNamespace(
        video_processor=SimpleNamespace(patch_size=PATCH, downsample_ratio=0.5),
        video_temporal_patch_dim=2,
        image_start_token="<img>",
        image_end_token="</img>",
        image_token="<image>",
    )
    metadata = SimpleNamespace(fps=3.0, frames_indices=video.numbers)
    inputs = {"num_frames": [5], "video_metadata": [metadata]}
    inputs["pixel_values_videos"] = tubelets[None]
    expected_text = NemotronH_Omni_Reasoning_V3Processor.replace_video_token(state, inputs, 0)
    texts = ["<image>" * part.num_outputs if isinstance(part, Tile) else part for part in parts]
    assert "".join(texts) == expected_text

    prompt = [5, 6, 7]
    for tile in tiles:
        prompt += [*[IMAGE_TOKEN] * tile.num_outputs, 8, 9]
    with torch.inference_mode():
        expected = reference(
            input_ids=torch.tensor([prompt]), pixel_values_videos=tubelets[None]
        ).logits[0]
    _check_logits(tmp_path, prompt, IMAGE_TOKEN, tiles, expected)


@pytest.mark.parametrize("compresses", [True, False])
def test_frames_of_video_llama_3_equal_those_of_transformers(tmp_path, compresses):
    reference = write_grid_model(tmp_path, "video_llama_3")
    fields = {"patch_size": PATCH, "size": {"shortest_edge": 64, "longest_edge": 8000}}
    fields["use_token_compression"] = compresses
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields))
    config = ConfigFields.read(tmp_path / "config.json")
    videos = read_video_processor(tmp_path, config, config.section("text_config"), {})
    smart_resize = _function("video_llama_3", "smart_resize")
    for count, size in ((1, (30, 21)), (5, (7, 70)), (30, (90, 40)), (200, (300, 17))):
        rows, columns = smart_resize(*size[::-1], 8, 64, 8000 // count)
        assert fit_frames(*size, count, videos, 10**5) == ((columns, rows),)

    video = _open(4, (30, 21), videos)
    # The third frame equals the second one, and the fourth one differs in its upper left.
    still = video.frames[1].copy()
    still.paste((0, 0, 0), (0, 0, 9, 7))
    video = video._replace(frames=[*video.frames[:2], video.frames[1], still])
    tiles = [part for part in frames(video, videos, ("", "")) if isinstance(part, Tile)]
    pixels = torch.cat([normalized_pixels(tile.payload, CPU, torch.float32) for tile in tiles])
    grid = len(pixels), pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
    cells = pixels.view(grid[0], 3, grid[1] // 2, 2, PATCH, grid[2] // 2, 2, PATCH)
    patches = cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * PATCH**2)
    grids, merges = torch.tensor([grid]), torch.tensor([2])
    method = _function("video_llama_3", "_get_compression_mask")
    mask = method(None, patches, grids, merges)
    if not compresses:
        mask = torch.ones_like(mask)
    assert [tile.num_outputs for tile in tiles] == mask.view(len(tiles), -1).sum(1).tolist()
    state = SimpleNamespace(video_token="<v>")
    times = [number / video.fps for number in video.numbers]
    inputs = {"video_grid_thw": grids, "video_merge_sizes": merges}
    inputs["video_compression_mask"] = mask
    metadata = SimpleNamespace(fps=3.0, timestamps=times)
    text = VideoLlama3Processor.replace_video_token(
        state, inputs | {"video_metadata": [metadata]}, 0
    )
    parts = frames(video, videos, ("", ""))
    texts = ["<v>" * part.num_outputs if isinstance(part, Tile) else part for part in parts]
    assert "".join(texts) == text

    prompt = [5, 6, 7]
    for tile in tiles:
        prompt += [*[videos.token_id] * tile.num_outputs, 8, 9]
    with torch.inference_mode():
        expected = reference(
            input_ids=torch.tensor([prompt]), pixel_values_videos=patches, **inputs
        ).logits[0]
    _check_logits(tmp_path, prompt, videos.token_id, tiles, expected)


def test_frames_of_ovis2_5_are_between_two_marks(tmp_path):
    reference = ovis2_5(tmp_path)
    added = {reference.image_token: {"content": "<|image_pad|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    config = ConfigFields.read(tmp_path / "config.json")
    videos = read_video_processor(tmp_path, config, config.section("llm_config"), {})
    assert (videos.mark, videos.num_frames) == ("<video>", 32)
    prompt, groups = [5, 6], []
    for count, size in ((3, (30, 21)), (1, (90, 40))):
        parts = frames(_open(count, size, videos), videos, ("", ""))
        groups.append(parts)
        assert sum(tile.num_outputs for tile in parts) % count == 2 % count
        prompt += [*[reference.image_token] * sum(tile.num_outputs for tile in parts), 8, 9]
    expected = reference.logits(prompt, [[tile.payload for tile in parts] for parts in groups])
    tiles = [tile for parts in groups for tile in parts]
    _check_logits(tmp_path, prompt, reference.image_token, tiles, expected)
