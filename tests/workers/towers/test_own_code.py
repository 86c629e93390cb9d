"""Models in the formats of their authors give the logits of their own code for images of any size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.frames import frames
from engine.frontend.media.layouts.pixels import Tile, Video
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import text_section, with_common_names
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.config.videos import VideoProcessor
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.workers.batch.rotary_positions import RotaryPositions
from engine.workers.batch.spans import Spans
from PIL import Image
from support.own_code.grid_towers.mimo import mimo_v2
from support.own_code.grid_towers.step3 import step3
from support.own_code.known_towers import (
    eagle2_5,
    locate_anything,
    nemotron_vl,
    phi4_siglip,
    points,
    sarashina2,
)
from support.own_code.known_towers.deepseek_ocr import deepseek_ocr
from support.own_code.known_towers.deepseek_vl2 import deepseek_vl2
from support.own_code.known_towers.glm_edge import glm_edge
from support.own_code.known_towers.isaac import isaac
from support.own_code.known_towers.kosmos2 import kosmos2
from support.own_code.known_towers.step_vl import step_vl
from support.own_code.model import OwnCodeModel
from support.own_code.own_towers.dots_ocr import dots_ocr
from support.own_code.own_towers.glm4v import glm4v_9b
from support.own_code.own_towers.minicpm import minicpmv
from support.own_code.own_towers.moondream import Moondream, moondream
from support.own_code.own_towers.nvila import nvila_lite
from support.own_code.own_towers.onevision2 import onevision2
from support.own_code.own_towers.openvla import openvla
from support.own_code.own_towers.ovis2_5 import ovis2_5
from support.own_code.own_towers.perception_lm import perception_lm
from support.own_code.own_towers.phi3_v import phi3_v
from support.own_code.own_towers.rice import rice
from support.own_code.own_towers.youtu import youtu_vl
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
MODELS: dict[str, Callable[[Path], OwnCodeModel | Moondream]] = {
    "deepseek_ocr": deepseek_ocr,
    "deepseek_ocr-unlimited": partial(deepseek_ocr, window=3),
    "deepseek_ocr-unlimited-hf": partial(deepseek_ocr, window=3, is_saved=True),
    "deepseek_vl2": deepseek_vl2,
    "deepseek_vl2-latent": partial(deepseek_vl2, is_latent=True),
    "dots_ocr": dots_ocr,
    "dots_ocr-vlm": partial(dots_ocr, is_vlm=True),
    "eagle2_5": eagle2_5,
    "glm_edge": glm_edge,
    "kosmos2": kosmos2,
    "locate_anything": locate_anything,
    "mimo_v2": mimo_v2,
    "mimo_v2-omni": partial(mimo_v2, architecture="MiMoV2OmniForCausalLM"),
    "moondream": moondream,
    "moondream-2": partial(moondream, is_third=False),
    "nemotron_vl": nemotron_vl,
    "nvila_lite": nvila_lite,
    "onevision2": onevision2,
    "openvla": openvla,
    "ovis2_5": ovis2_5,
    "ovis2_5-moe": partial(ovis2_5, architecture="Ovis2_6_MoeForCausalLM"),
    "ovis2_5-next": partial(ovis2_5, architecture="Ovis2_6_NextForCausalLM"),
    "perception_lm": perception_lm,
    "perception_lm-classless": partial(perception_lm, has_class=False),
    "phi3_v": phi3_v,
    "phi4_siglip": phi4_siglip,
    "points": points,
    "rice": rice,
    "sarashina2": sarashina2,
    "step3": step3,
    "step_vl": step_vl,
    "step_vl-5": partial(step_vl, is_fifth=True),
    "youtu_vl": youtu_vl,
    **{
        f"minicpmv-{version}": partial(minicpmv, version=version)
        for version in ("2.5", "2.6", "4.0", "4.5")
    },
}
PLACEHOLDERS = {
    "deepseek_ocr": "<image>",
    "deepseek_vl2": "<image>",
    "dots_ocr": "<|imgpad|>",
    "eagle2_5": "<IMG_CONTEXT>",
    "glm_edge": "<|begin_of_image|>",
    "kosmos2": "<unk>",
    "locate_anything": "<IMG_CONTEXT>",
    "minicpmv": "<unk>",
    "mimo_v2": "<|image_pad|>",
    "moondream": "<|endoftext|>",
    "nemotron_vl": "<image>",
    "nvila_lite": "<image>",
    "onevision2": "<|image_pad|>",
    "openvla": "<PAD>",
    "ovis2_5": "<|image_pad|>",
    "perception_lm": "<|image|>",
    "phi3_v": "<|image|>",
    "phi4_siglip": "<|dummy_0|>",
    "points": "<|image_pad|>",
    "rice": "<|image_pad|>",
    "sarashina2": "<|file|>",
    "step3": "<im_patch>",
    "step_vl": "<im_patch>",
    "youtu_vl": "<|image_pad|>",
}


WITHOUT_PROGRAM = {
    "moondream",
    "deepseek_ocr-unlimited",
    "deepseek_ocr-unlimited-hf",
    "kosmos2",
    "step3",
    "step_vl-5",
}
"""Models whose decoders native programs do not compute."""

WITHOUT_TOWER_PROGRAM = {"mimo_v2", "mimo_v2-omni", "onevision2"}
"""Models whose towers native programs do not compute, for their rotation or the biases of their scores."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_the_authors_code(
    tmp_path: Path, kind: str, load: Callable[..., Any]
) -> None:
    reference = MODELS[kind](tmp_path)
    added = {reference.image_token: {"content": PLACEHOLDERS[kind.split("-")[0]]}}
    tokenizer = {"added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = read_model_config(tmp_path)
    processor = read_image_processor(tmp_path, config, text_section(config) or config, {})
    assert processor is not None
    rng = random.Random(3)
    prompt, images, payloads, inputs = [1], [], [], []
    for seed, size in enumerate([(30, 21), (9, 90), (100, 44), (200, 180)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
        tiles = []
        for part in process_image(Image.fromarray(pixels), processor):
            if isinstance(part, Tile):
                inputs.append(EncoderInput(len(prompt), part.num_outputs, b"", seed))
                prompt += [reference.image_token] * part.num_outputs
                tiles.append(part.payload)
                payloads.append(part.payload)
            else:
                prompt.append(rng.randrange(90))
        images.append(tiles)
    prompt += [rng.randrange(90) for _ in range(5)]
    # The tokens after the last image are output.
    num_prompt = len(prompt) - 5
    limits = {"num_prompt_tokens": num_prompt} if "unlimited" in kind else {}
    expected = reference.logits(prompt, images, **limits)
    make = load_decoder if kind in WITHOUT_PROGRAM else load
    decoder = make(tmp_path, max_model_len=2048)
    tower = load_tower(tmp_path, decoder, load_decoder if kind in WITHOUT_TOWER_PROGRAM else load)
    encoded = torch.cat([tower(payload) for payload in payloads])
    is_image = np.array(prompt) == reference.image_token
    runner = Runner(decoder, 1, max_tokens=2048)
    runner.num_prompt_tokens = num_prompt
    # The first chunk ends within an image, unless its tokens attend to each other.
    first = 4
    if decoder.spec.span_kind is not None:
        runner.spans, first = Spans(decoder.spec.span_kind), 1
        runner.spans.add_request(0, len(prompt), inputs)
    found = media_logits(runner, prompt, is_image, encoded, [first])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_images_of_isaac_are_one_moment(tmp_path: Path, load: Callable[..., Any]) -> None:
    reference = isaac(tmp_path)
    added = {reference.image_token: {"content": "<|image_pad|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    config = ConfigFields.read(tmp_path / "config.json")
    processor = read_image_processor(tmp_path, config, config, {})
    assert processor is not None
    rng = random.Random(3)
    prompt, inputs, payloads = [1, 2], [], []
    for seed, size in enumerate([(30, 21), (9, 90), (100, 44), (5, 7)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
        [tile] = [
            part
            for part in process_image(Image.fromarray(pixels), processor)
            if isinstance(part, Tile)
        ]
        assert isinstance(tile.payload, ImagePayload)
        assert 16 <= tile.payload.width * tile.payload.height / 16 <= 120
        shape = tile.payload.height, tile.payload.width, 3
        found = np.frombuffer(tile.payload.pixels, np.uint8).reshape(shape)
        image = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None].float()
        resized = torch.nn.functional.interpolate(image, shape[:2], mode="bilinear")[0]
        assert np.abs(found - resized.permute(1, 2, 0).numpy()).max() < 0.51
        inputs.append(EncoderInput(len(prompt), tile.num_outputs, b"", 1, grid=tile.grid))
        prompt += [*[reference.image_token] * tile.num_outputs, rng.randrange(90), 3]
        payloads.append(tile.payload)
    expected = reference.logits(prompt, [[payload] for payload in payloads])
    decoder = load(tmp_path, max_model_len=2048)
    tower = load_tower(tmp_path, decoder, load)
    encoded = torch.cat([tower(payload) for payload in payloads])
    is_image = np.array(prompt) == reference.image_token
    rotary, runner = RotaryPositions(1), Runner(decoder, 1, max_tokens=2048)
    rotary.add_request(0, inputs)
    logits = media_logits(runner, prompt, is_image, encoded, [4], rotary)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_images_of_glm4v_9b_have_one_position(tmp_path: Path, load: Callable[..., Any]) -> None:
    reference = glm4v_9b(tmp_path)
    config = ConfigFields.read(tmp_path / "config.json")
    processor = read_image_processor(tmp_path, config, with_common_names(config), {})
    assert processor is not None
    rng = random.Random(3)
    prompt, inputs, payloads = [1, 2], [], []
    for seed, size in enumerate([(30, 21), (9, 90)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
        [tile] = [
            part
            for part in process_image(Image.fromarray(pixels), processor)
            if isinstance(part, Tile)
        ]
        inputs.append(EncoderInput(len(prompt), tile.num_outputs, b"", 1, grid=tile.grid))
        own = [reference.image_token] * (tile.num_outputs - 2)
        prompt += [reference.marks[0], *own, reference.marks[1], rng.randrange(90), 3]
        payloads.append(tile.payload)
    expected = reference.logits(prompt, [[payload] for payload in payloads])
    decoder = load(tmp_path, max_model_len=256)
    tower = load_tower(tmp_path, decoder, load)
    encoded = torch.cat([tower(payload) for payload in payloads])
    is_image = np.isin(prompt, [reference.image_token, *reference.marks])
    rotary, runner = RotaryPositions(1), Runner(decoder, 1, max_tokens=256)
    rotary.add_request(0, inputs)
    logits = media_logits(runner, prompt, is_image, encoded, [4], rotary)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_frames_of_llava_onevision_1_5_are_encoded_one_by_one(tmp_path: Path) -> None:
    reference = rice(tmp_path)
    # The authors' file is that of Qwen2.5-VL, whose patches have two frames.
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temporal_patch_size": 2}))
    config = ConfigFields.read(tmp_path / "config.json")
    text = text_section(config)
    assert text is not None
    processor = read_video_processor(tmp_path, config, text, {})
    assert isinstance(processor, VideoProcessor)
    shape = 3, 40, 24, 3
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    video = Video([*map(Image.fromarray, pixels)], [0, 1, 2], 2.0, 2.0, 1.5)
    found = [part for part in frames(video, processor, ("", "")) if isinstance(part, Tile)]
    assert len(found) == 3
    decoder = load_decoder(tmp_path, max_model_len=64)
    tower = load_tower(tmp_path, decoder)
    for tile in found:
        assert isinstance(tile.payload, ImagePayload)
        with torch.inference_mode():
            [expected] = reference.encode([tile.payload])
        torch.testing.assert_close(tower(tile.payload), expected, atol=1e-4, rtol=1e-4)
