"""Models whose decoder has one position a token give the logits of transformers for images of any size."""

import json
import random

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.canvas import with_places
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.workers.batch.rotary_positions import RotaryPositions
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.make_tower import make_tower
from engine.workers.towers.placed import Placed
from PIL import Image
from safetensors.torch import load_file, save_file
from support.decoders import CPU, TOWER_LAYERS, Runner, load_decoder, load_native_decoder
from support.grid_configs import (
    IMAGE_TOKEN,
    MARKS,
    MEAN_AND_STD,
    MINICPM_MODELS,
    MUSE_MODELS,
    OVIS_MARK_IDS,
    OVIS_MARKS,
    PAIRED,
    PATCH,
    SIZES,
    SQUARE_MODELS,
    image_config,
)
from support.qwen_checkpoints import video_patches

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=[
        "exaone4_5",
        "hyperclovax_vision_v2",
        "kimi_k25",
        "kimi_vl",
        "minimax_m3_vl",
        "lfm2_vl",
        "inkling2",
        *MINICPM_MODELS,
        *MUSE_MODELS,
        "deepseek_ocr2",
        *SQUARE_MODELS,
        "apertus1p5",
    ],
)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    reference = transformers.AutoModelForImageTextToText.from_config(
        image_config(request.param), attn_implementation="eager"
    )
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    reference.eval().save_pretrained(path)
    processor = {"patch_size": PATCH, "merge_size": 2, "max_patches": 60}
    if request.param in PAIRED:
        processor |= {"min_pixels": 256, "max_pixels": 4096, "temporal_patch_size": 2}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    elif request.param in MINICPM_MODELS:
        processor = {"patch_size": PATCH, "scale_resolution": 28, "max_slice_nums": 4}
        marks = ("image_start", "image_end", "slice_start", "slice_end")
        marks += ("image_id_start", "image_id_end")
        tokens = {f"{name}_token": f"<{name}>" for name in marks}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif request.param in SQUARE_MODELS:
        side = 32 if request.param == "got_ocr2" else 24
        processor = {"size": {"height": side, "width": side}, "min_size": 5}
        processor |= {"crop_to_patches": True, "max_patches": 4}
        processor |= {"high_res_size": {"height": 64, "width": 64}, "image_mean": [0.4, 0.5, 0.6]}
        tokens = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif request.param == "deepseek_ocr2":
        processor = {"size": {"height": 256, "width": 256}, "tile_size": 192, "max_patches": 2}
    elif request.param == "apertus1p5":
        processor = {"size": {"min_pixels": 256, "max_pixels": 4096}, "spatial_factor": 4}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        names = ("boi", "eoi", "image_wrapper", "eol")
        tokens = {f"{name}_token": f"<{name}>" for name in names}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif request.param in MUSE_MODELS:
        processor |= {"max_image_tokens": 30}
    elif request.param == "lfm2_vl":
        processor = {"encoder_patch_size": PATCH, "tile_size": 16, "max_tiles": 4}
        processor |= {"min_image_tokens": 4, "max_image_tokens": 20}
    elif request.param == "inkling2":
        processor = {"size": {"height": 2 * PATCH, "width": 2 * PATCH}}
    elif request.param == "kimi_k25":
        _restore_decoder_names(path / "model.safetensors")
    elif request.param == "kimi_vl":
        _restore_decoder_names(path / "model.safetensors")
        _as_kimi_vl(path)
        processor = {"patch_size": PATCH, "merge_kernel_size": [2, 2], "in_token_limit": 60}
        processor |= {"pad_input": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if request.param == "hyperclovax_vision_v2":
        _as_published_hyperclova(path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path, reference


def _restore_decoder_names(file):
    """Undo what transformers does when it saves Kimi K2.5: it renames layers of the decoder like those of the tower."""
    tensors = load_file(file)
    assert "vision_tower.encoder.blocks.0.wqkv.weight" in tensors
    wrong, right = "language_model.model.blocks", "language_model.model.layers"
    save_file({name.replace(wrong, right): tensors[name] for name in tensors}, file)


def _as_published_hyperclova(path):
    """Give HyperCLOVA X SEED Think the names that it has on the hub, and a part that writes images."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    assert any("vision_projector" in name for name in tensors)
    tensors = {name.replace("vision_projector", "mm_projector"): tensors[name] for name in tensors}
    save_file(tensors | {"model.discrete_vision_model.weight": torch.zeros(1)}, file)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm"}
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    (path / "config.json").write_text(json.dumps(config))


def _as_kimi_vl(path):
    """Give Kimi K2.5 the names of Kimi-VL, whose tower is the same for images."""
    file = path / "model.safetensors"
    names = {"mm_projector.pre_norm": "multi_modal_projector.pre_norm"}
    names |= {
        f"mm_projector.proj.{i}": f"multi_modal_projector.linear_{i // 2 + 1}" for i in (0, 2)
    }
    tensors = load_file(file)
    for old, new in names.items():
        assert any(old in name for name in tensors)
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    vision = {name: vision[name] for name in (*names, "patch_size", "merge_kernel_size")}
    vision |= {"init_pos_emb_height": 6, "init_pos_emb_width": 6}
    published = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "media_placeholder_token_id": IMAGE_TOKEN,
        "text_config": config["text_config"],
        "vision_config": vision,
    }
    (path / "config.json").write_text(json.dumps(published))


def _patches(kind, payload):
    """Return the patches of an image as transformers' processor makes them."""
    image = Image.frombytes("RGB", (payload.width, payload.height), payload.pixels)
    if kind in PAIRED:
        return video_patches([image], *MEAN_AND_STD)
    pixels = torch.from_numpy(np.array(image)).float().div(255).sub(0.5).div(0.5)
    cells = pixels.permute(2, 0, 1).unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))
    if kind in MINICPM_MODELS:
        return cells.permute(0, 2, 1, 3, 4).flatten(2)
    if kind in MUSE_MODELS:
        # Patches row by row, each with two equal frames.
        patches = cells.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)
        return torch.cat((patches, patches), 1)
    if kind == "lfm2_vl":
        return cells.permute(1, 3, 2, 4, 0).flatten(0, 1).flatten(1)
    return cells.permute(1, 3, 0, 2, 4).flatten(0, 1)


def _normalized(payload):
    pixels = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    values = (pixels / 255 - np.array(payload.mean)) / np.array(payload.std)
    return torch.from_numpy(values.transpose(2, 0, 1)).float()


def _deepseek_inputs(payloads):
    sides = [payload.width // PATCH for payload in payloads]
    images = [
        _patches("deepseek_ocr2", payload)
        .unflatten(0, (side, side))
        .permute(2, 0, 3, 1, 4)
        .reshape(3, payload.height, payload.width)
        for payload, side in zip(payloads, sides, strict=True)
    ]
    is_whole = [payload.is_last for payload in payloads]
    ends = np.flatnonzero(is_whole)
    whole, tiles = (
        torch.stack([image for image, each in zip(images, is_whole, strict=True) if each is kind])
        for kind in (True, False)
    )
    counts = (np.diff(ends, prepend=-1) - 1).tolist()
    return {"pixel_values": whole, "pixel_values_local": tiles, "num_local_patches": counts}


def _inkling_patches(payload):
    """Return the pixels of each embedding, with margins below those of an image, and the image's grid."""
    pixels = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    values = np.full(pixels.shape, -1, np.float32)
    shown = slice(payload.original_height), slice(payload.original_width)
    values[shown] = pixels[shown]
    unit = 2 * PATCH
    rows, columns = (length // unit for length in pixels.shape[:2])
    cells = torch.from_numpy(values / 255 * 2 - 1).view(rows, unit, columns, unit, 3)
    return cells.transpose(1, 2).flatten(0, 1), [1, rows, columns]


def _reference_inputs(kind, payloads):
    if kind == "deepseek_ocr2":
        return _deepseek_inputs(payloads)
    if kind == "apertus1p5":
        # Images of several sizes are padded.
        sizes = torch.tensor([[each.height, each.width] for each in payloads])
        height, width = sizes.max(0).values.tolist()
        images = [
            torch.nn.functional.pad(
                _normalized(each), (0, width - each.width, 0, height - each.height)
            )
            for each in payloads
        ]
        return {"pixel_values": torch.stack(images), "image_sizes": sizes}
    if kind in SQUARE_MODELS:
        names = {"pixel_values": payloads}
        if kind == "deepseek_vl_hybrid":
            names["high_res_pixel_values"] = [payload.fine for payload in payloads]
        return {name: torch.stack([*map(_normalized, each)]) for name, each in names.items()}
    if kind == "inkling2":
        patches, grids = zip(*map(_inkling_patches, payloads), strict=True)
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    patches = [_patches(kind, payload) for payload in payloads]
    grids = torch.tensor([[1, each.height // PATCH, each.width // PATCH] for each in payloads])
    if kind in MINICPM_MODELS:
        return {"pixel_values": torch.cat(patches, -1)[None], "target_sizes": grids[:, 1:]}
    if kind != "lfm2_vl":
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
    masks = [torch.ones(len(each), dtype=torch.int64) for each in patches]
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(patches, True),
        "pixel_attention_mask": torch.nn.utils.rnn.pad_sequence(masks, True),
        "spatial_shapes": grids[:, 1:],
    }


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load):
    path, reference = model
    config = ConfigFields.read(path / "config.json")
    processor = read_image_processor(path, config, config.section("text_config"), {})
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
                if has_canvas:
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
    inputs = _reference_inputs(reference.config.model_type, payloads)
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
    tower = make_tower(
        decoder.spec.encoder,
        TowerSource(open_checkpoint(path), CPU, torch.float32, make_layers=TOWER_LAYERS[load]),
    )
    encoded = torch.cat([tower(payload) for payload in payloads])
    is_placed = is_image
    if reference.config.model_type == "ovis2":
        is_placed = np.isin(prompt, [IMAGE_TOKEN, *OVIS_MARK_IDS])
    rows = np.where(is_placed, np.cumsum(is_placed) - 1, -1).astype(np.int32)
    runner = Runner(decoder, 1, max_tokens=1024)
    found = []
    for start, end in ((0, 9), (9, len(prompt))):
        decoder.placed = Placed(rows[start:end].copy(), encoded)
        if rotary is not None:
            loc, at = np.array([0, end - start], np.int32), np.arange(start, end, dtype=np.int32)
            decoder.rotary_T3 = torch.from_numpy(rotary.of_step(np.zeros(1, np.int32), loc, at))
        found.append(runner.step({0: prompt[start:end]})[0])
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
