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
from support.families import SMALL
from support.families.experts import BLOCKS_OF_KEYS, LATENT
from support.families.recurrent import RECURRENT
from support.qwen_checkpoints import video_patches

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
PATCH, IMAGE_TOKEN = 4, 96
KIMI = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
EXAONE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 48,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "depth": 3,
    "patch_size": PATCH,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
SIGLIP = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "num_patches": 36,
}
MINICPM = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "patch_size": PATCH,
    "image_size": 28,
}
MUSE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention", "window_attention"],
}
DEEPSEEK = {
    "sam_config": {
        "hidden_size": 24,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 256,
        "patch_size": PATCH,
        "window_size": 10,
        "global_attn_indexes": [1],
        "mlp_dim": 40,
        "downsample_channels": [20, 48],
    },
    "encoder_config": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SQUARE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "image_size": 24,
}
JANUS_IMAGES = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "latent_channels": 32,
    "num_embeddings": 16,
    "projection_dim": 48,
    "image_token_embed_dim": 48,
}
INKLING = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "posemb_grid_size": 6,
    "projection_hidden_dim": 56,
}
SQUARE_MODELS = ("janus", "deepseek_vl", "deepseek_vl_hybrid", "ovis2")
PAIRED = ("exaone4_5", "hyperclovax_vision_v2", "minimax_m3_vl")
"""Models whose patches have two frames."""
MINICPM_MODELS = ("minicpmv4_6", "minicpm_ocr", "minicpmv4_7")
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
OVIS_MARK_IDS = [90, 91, 92, 93, 95]
MARKS = {"<image_start>": 90, "<image_end>": 91, "<slice_start>": 92, "<slice_end>": 93, "\n": 94}
SIZES = {"deepseek_ocr2": ((30, 21), (250, 150)), "minicpmv4_7": ((30, 21), (60, 55), (90, 40))}
MEAN_AND_STD = ([0.5] * 3, [0.5] * 3)


def _config(kind):
    text = SMALL | {"head_dim": 8}
    if kind == "janus":
        return transformers.JanusConfig(
            vision_config=SQUARE | {"mlp_ratio": 1.5, "projection_dim": 48},
            vq_config=JANUS_IMAGES,
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "deepseek_vl":
        return transformers.DeepseekVLConfig(
            vision_config=SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False},
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "deepseek_vl_hybrid":
        return transformers.DeepseekVLHybridConfig(
            vision_config=SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False},
            high_res_vision_config=DEEPSEEK["sam_config"]
            | {"model_type": "sam_vision_model", "image_size": 64, "num_hidden_layers": 3},
            text_config=text | {"model_type": "llama"},
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "ovis2":
        return transformers.Ovis2Config(
            vision_config=SQUARE | {"hidden_stride": 2, "vocab_size": 40},
            text_config=SMALL | {"model_type": "qwen2"},
            image_token_id=IMAGE_TOKEN,
            visual_indicator_token_ids=OVIS_MARK_IDS,
            hidden_size=SMALL["hidden_size"],
            vocab_size=SMALL["vocab_size"],
        )
    if kind == "exaone4_5":
        return transformers.Exaone4_5_Config(
            vision_config=EXAONE,
            text_config=text | {"model_type": "exaone4", "sliding_window": 9},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "deepseek_ocr2":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        experts |= {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        return transformers.DeepseekOcr2Config(
            vision_config=DEEPSEEK, text_config=SMALL | experts, image_token_id=IMAGE_TOKEN
        )
    if kind == "lfm2_vl":
        layers = {"layer_types": ["conv", "full_attention", "conv"]}
        return transformers.Lfm2VlConfig(
            vision_config=SIGLIP,
            text_config=SMALL | {"model_type": "lfm2"} | layers,
            projector_hidden_size=56,
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=True,
        )
    if kind == "muse_glimmer":
        return transformers.MuseGlimmerConfig(
            vision_config=MUSE,
            text_config=text | {"sliding_window": 9},
            out_hidden_size=4 * 48,
            projector_hidden_size=56,
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "minimax_m3_vl":
        layers = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        layers["layer_types"] = ["full_attention"] * 3
        # Two of 20 elements of a head are not rotated.
        vision = KIMI | {"model_type": "minimax_m3_vl_vision", "hidden_size": 80}
        return transformers.MiniMaxM3VLConfig(
            vision_config=vision,
            text_config=SMALL | BLOCKS_OF_KEYS | layers,
            projector_hidden_size=56,
            image_token_index=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "hyperclovax_vision_v2":
        return transformers.HyperCLOVAXVisionV2Config(
            vision_config=EXAONE | {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 40},
            text_config=SMALL | {"model_type": "hyperclovax", "logits_scaling": 0.5},
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if kind == "minicpmv4_7":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        decoder = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}
        decoder["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
        return transformers.MiniCPMV4_7Config(
            vision_config=MINICPM,
            text_config=text | decoder,
            insert_layer_id=1,
            image_token_id=IMAGE_TOKEN,
            **dict(zip(names, MARKS.values(), strict=True)),
        )
    if kind == "minicpm_ocr":
        # All positions of a token are equal, although the decoder's config has three axes.
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        decoder = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}
        decoder["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        return transformers.MiniCPMOcrConfig(
            vision_config=MINICPM, text_config=text | decoder, image_token_id=IMAGE_TOKEN
        )
    if kind == "minicpmv4_6":
        return transformers.MiniCPMV4_6Config(
            vision_config=MINICPM,
            text_config=text | {"model_type": "qwen3"},
            insert_layer_id=1,
            image_token_id=IMAGE_TOKEN,
        )
    if kind == "inkling2":
        size = SMALL["hidden_size"]
        return transformers.Inkling2Config(
            vision_config=INKLING | {"text_hidden_size": size},
            text_config=SMALL | RECURRENT["inkling2"][1],
            image_token_id=IMAGE_TOKEN,
        )
    latent = LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 3}
    return transformers.Kimi_K25Config(
        vision_config=KIMI,
        text_config=SMALL | latent,
        projection_hidden_size=48,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )


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
        "muse_glimmer",
        "deepseek_ocr2",
        *SQUARE_MODELS,
    ],
)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    reference = transformers.AutoModelForImageTextToText.from_config(
        _config(request.param), attn_implementation="eager"
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
        processor = {"size": {"height": 24, "width": 24}, "min_size": 5}
        processor |= {"crop_to_patches": True, "max_patches": 4}
        processor |= {"high_res_size": {"height": 64, "width": 64}, "image_mean": [0.4, 0.5, 0.6]}
        tokens = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif request.param == "deepseek_ocr2":
        processor = {"size": {"height": 256, "width": 256}, "tile_size": 192, "max_patches": 2}
    elif request.param == "muse_glimmer":
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
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path, reference


def _restore_decoder_names(file):
    """Undo what transformers does when it saves Kimi K2.5: it renames layers of the decoder like those of the tower."""
    tensors = load_file(file)
    assert "vision_tower.encoder.blocks.0.wqkv.weight" in tensors
    wrong, right = "language_model.model.blocks", "language_model.model.layers"
    save_file({name.replace(wrong, right): tensors[name] for name in tensors}, file)


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
    if kind == "muse_glimmer":
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
