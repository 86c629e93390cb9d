"""Models whose decoder has one position a token give the logits of transformers for images of any size."""

import random

import numpy as np
import pytest
import torch
from engine.frontend.media.canvas import with_places
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.field_names import text_section
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.workers.batch.rotary_positions import RotaryPositions
from PIL import Image
from support.vision.grid_configs import (
    IMAGE_TOKEN,
    INKLING_MODELS,
    MARKS,
    MINICPM_MODELS,
    MUSE_MODELS,
    OVIS_MARK_IDS,
    OVIS_MARKS,
    SIZES,
    SQUARE_MODELS,
)
from support.vision.grid_models import reference_inputs, write_grid_model
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=[
        "dots3_note",
        "dots3_note-published",
        "exaone4_5",
        "opencua",
        "hyperclovax_vision_v2",
        "kimi_k25",
        "kimi_vl",
        "minimax_m3_vl",
        "lfm2_vl",
        *INKLING_MODELS,
        *MINICPM_MODELS,
        *MUSE_MODELS,
        "deepseek_ocr2",
        *SQUARE_MODELS,
        "janus-published",
        "deepseek_vl-published",
        "deepseek_vl_hybrid-published",
        "apertus1p5",
        "chameleon",
        "video_llama_3",
        "nemotron_h_omni",
        "idefics2",
        "step3p7",
    ],
)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, write_grid_model(path, request.param)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load):
    path, reference = model
    if reference.config.model_type == "chameleon" and load is load_native_decoder:
        pytest.skip("its decoder runs in torch")
    config = read_model_config(path)
    processor = read_image_processor(path, config, text_section(config) or config, {})
    rng = random.Random(3)
    prompt, payloads, groups = [], [], []
    has_canvas = reference.config.model_type == "minicpmv4_7"
    sizes = SIZES.get(reference.config.model_type, ((30, 21), (7, 70), (90, 40)))
    for seed, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        parts = process_image(Image.fromarray(pixels), processor)
        group = []
        for part in parts:
            if not isinstance(part, Tile):
                if has_canvas and part:
                    prompt.append(MARKS[part])
                continue
            if not has_canvas:
                prompt += [rng.randrange(90) for _ in range(4)]
            size = part.num_outputs
            group.append(EncoderInput(len(prompt), size, b"", size, grid=part.grid))
            before, after = (
                [OVIS_MARK_IDS[OVIS_MARKS.index(text)] for text in texts]
                for texts in (part.before, part.after)
            )
            num_tokens = size - len(before) - len(after)
            prompt += [*before, *[IMAGE_TOKEN] * num_tokens, *after]
            payloads.append(part.payload)
        # The line break belongs to the image if there is a canvas.
        prompt += [MARKS["\n"], *(rng.randrange(90) for _ in range(4))]
        groups.append(group)
    inputs = reference_inputs(reference.config.model_type, payloads)
    is_image = np.array(prompt) == IMAGE_TOKEN
    rotary: RotaryPositions | None = None
    if has_canvas:
        inputs["mm_token_type_ids"] = torch.from_numpy(is_image[None].astype(np.int64))
        rotary = RotaryPositions(1)
        placed = [with_places(prompt, group, MARKS.values()) for group in groups]
        rotary.add_request(0, [item for group in placed for item in group])
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), **inputs).logits[0]
    decoder = load(path, max_model_len=1024)
    # Native programs do not choose experts.
    has_experts = reference.config.model_type == "dots3_note"
    tower = load_tower(path, decoder, load_decoder if has_experts else load)
    encoded = torch.cat([tower(payload) for payload in payloads])
    is_placed = is_image
    if reference.config.model_type == "ovis2":
        is_placed = np.isin(prompt, [IMAGE_TOKEN, *OVIS_MARK_IDS])
    runner = Runner(decoder, 1, max_tokens=1024)
    found = media_logits(runner, prompt, is_placed, encoded, [9], rotary)
    # Chameleon never writes the tokens of images, whose logits are the smallest ones.
    logits, expected = (each.clamp(min=-1e20) for each in (found, expected))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
