"""Tiny models that read images of any size, as files on disk, and the inputs of transformers' models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from PIL import Image
from safetensors.torch import load_file, save_file
from support.own_code.model import normalized
from support.vision.grid_configs import (
    DOTS,
    DOTS_AUDIO,
    IMAGE_TOKEN,
    INKLING_MODELS,
    MEAN_AND_STD,
    MINICPM_MODELS,
    MUSE_MODELS,
    PAIRED,
    PATCH,
    RADIO_PROCESSOR,
    SQUARE_MODELS,
    image_config,
)
from support.vision.published_llava import as_deepseek
from support.vision.qwen import video_patches
from torch import Tensor


class GridModel(NamedTuple):
    """Transformers' model, as a reference for a server."""

    reference: Any
    kind: str

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], images: Sequence[Sequence[ImagePayload]]) -> Tensor:
        """Return the logits [T, V] of a prompt with images, each of which is a list of encoder inputs."""
        inputs = {}
        if images:
            inputs = reference_inputs(self.kind, [payload for each in images for payload in each])
        logits: Tensor = self.reference(input_ids=torch.tensor([tokens]), **inputs).logits[0]
        return logits


def grid_model(path: Path, kind: str, *, vocab_size: int, image_token: int) -> GridModel:
    """Write a model with this vocabulary."""
    return GridModel(
        write_grid_model(path, kind, vocab_size=vocab_size, image_token=image_token),
        kind.removesuffix("-published"),
    )


def write_grid_model(path: Path, kind: str, *, vocab_size: int = 0, image_token: int = 0) -> Any:
    """Write a model, and return that of transformers. Without the last two arguments, they are those of its config."""
    torch.manual_seed(0)
    kind, is_published = kind.removesuffix("-published"), kind.endswith("-published")
    config = image_config(kind)
    if vocab_size:
        config.get_text_config().vocab_size = vocab_size
    if image_token:
        config.image_token_id = image_token
        if kind == "chameleon":
            config.vocabulary_map["<image>"] = image_token
    reference = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    for name, parameter in reference.named_parameters():
        if "layer_scale" not in name or kind != "nemotron_h_omni":
            torch.nn.init.normal_(parameter, 0, 0.2)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0, 0.3)
    reference.eval().save_pretrained(path)
    processor = {"patch_size": PATCH, "merge_size": 2, "max_patches": 60}
    if kind in PAIRED:
        processor |= {"min_pixels": 256, "max_pixels": 4096, "temporal_patch_size": 2}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    elif kind in MINICPM_MODELS:
        processor = {"patch_size": PATCH, "scale_resolution": 28, "max_slice_nums": 4}
        marks = ("image_start", "image_end", "slice_start", "slice_end")
        marks += ("image_id_start", "image_id_end")
        tokens = {f"{name}_token": f"<{name}>" for name in marks}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif kind in SQUARE_MODELS:
        side = 32 if kind in ("got_ocr2", "pp_chart2table") else 24
        processor = {"size": {"height": side, "width": side}, "min_size": 5}
        processor |= {"crop_to_patches": True, "max_patches": 4}
        processor |= {"high_res_size": {"height": 64, "width": 64}, "image_mean": [0.4, 0.5, 0.6]}
        tokens = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif kind == "nemotron_h_omni":
        processor = RADIO_PROCESSOR | {"max_num_patches": 180}
    elif kind == "video_llama_3":
        processor = {"patch_size": PATCH, "min_pixels": 64, "max_pixels": 900}
    elif kind == "step3p7":
        processor = {"size": {"height": 32, "width": 32}, "patch_size": 16, "max_image_size": 64}
    elif kind == "idefics2":
        processor = {"size": {"shortest_edge": 14, "longest_edge": 39}, "do_image_splitting": True}
    elif kind == "dots3_note":
        processor = {"min_pixels": 256, "max_pixels": 4096, "temporal_patch_size": 1}
        processor |= {"patch_size": PATCH, "merge_size": 2}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        if is_published:
            processor = {"vision_config": processor}
    elif kind == "deepseek_ocr2":
        processor = {"size": {"height": 256, "width": 256}, "tile_size": 192, "max_patches": 2}
    elif kind == "apertus1p5":
        processor = {"size": {"min_pixels": 256, "max_pixels": 4096}, "spatial_factor": 4}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        names = ("boi", "eoi", "image_wrapper", "eol")
        tokens = {f"{name}_token": f"<{name}>" for name in names}
        (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    elif kind == "chameleon":
        side = {"height": 24, "width": 24}
        processor = {"size": {"shortest_edge": 28}, "crop_size": side}
        # Published configs do not have it beside the whole vocabulary.
        config_path = path / "config.json"
        fields = json.loads(config_path.read_text())
        config_path.write_text(json.dumps({**fields, "image_token_id": None}))
    elif kind in MUSE_MODELS:
        processor |= {"max_image_tokens": 30}
    elif kind == "lfm2_vl":
        processor = {"encoder_patch_size": PATCH, "tile_size": 16, "max_tiles": 4}
        processor |= {"min_image_tokens": 4, "max_image_tokens": 20}
    elif kind in INKLING_MODELS:
        processor = {"size": {"height": 2 * PATCH, "width": 2 * PATCH}}
    elif kind == "kimi_k25":
        _restore_decoder_names(path / "model.safetensors")
    elif kind == "kimi_vl":
        _restore_decoder_names(path / "model.safetensors")
        _as_kimi_vl(path)
        processor = {"patch_size": PATCH, "merge_kernel_size": [2, 2], "in_token_limit": 60}
        processor |= {"pad_input": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "opencua":
        _as_published_opencua(path)
    if is_published and kind == "dots3_note":
        _as_published_dots3(path)
    elif is_published:
        as_deepseek(path)
    if kind == "hyperclovax_vision_v2":
        _as_published_hyperclova(path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return reference


def _restore_decoder_names(file: Path) -> None:
    """Undo what transformers does when it saves Kimi K2.5: it renames layers of the decoder like those of the tower."""
    tensors = load_file(file)
    assert "vision_tower.encoder.blocks.0.wqkv.weight" in tensors
    wrong, right = "language_model.model.blocks", "language_model.model.layers"
    save_file({name.replace(wrong, right): tensors[name] for name in tensors}, file)


def _as_published_hyperclova(path: Path) -> None:
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


def _as_published_dots3(path: Path) -> None:
    """Give a dots3-note the config of its authors, in which the decoder is not nested and the token has no id."""
    config = json.loads((path / "config.json").read_text())
    token = config["image_token_id"]
    own = {"hidden_size": 48, "adapter_type": "patch_merger", "pre_pixel_shuffle": True}
    published = {
        **config["text_config"],
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note",
        "vision_config": DOTS | own,
        "audio_config": DOTS_AUDIO,
    }
    (path / "config.json").write_text(json.dumps(published))
    if not (path / "tokenizer_config.json").exists():
        tokenizer = {"added_tokens_decoder": {token: {"content": "<|imgpad|>"}}}
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _as_published_opencua(path: Path) -> None:
    """Give a model with the tower of Qwen2.5-VL the names of OpenCUA."""
    file = path / "model.safetensors"
    stored = {}
    for name, tensor in load_file(file).items():
        name = re.sub(r"^model\.visual\.", "vision_tower.", name)
        name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
        stored[re.sub(r"^lm_head\.", "language_model.lm_head.", name)] = tensor
    assert any(name.startswith("vision_tower.blocks.") for name in stored)
    save_file(stored, file)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["OpenCUAForConditionalGeneration"], "model_type": "opencua"}
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    (path / "config.json").write_text(json.dumps(config))


def _as_kimi_vl(path: Path) -> None:
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


def _patches(kind: str, payload: ImagePayload) -> Tensor:
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
    if kind == "dots3_note":
        squares = cells.unflatten(3, (-1, 2)).unflatten(1, (-1, 2))
        return squares.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
    return cells.permute(1, 3, 0, 2, 4).flatten(0, 1)


def _deepseek_inputs(payloads: Sequence[ImagePayload]) -> dict[str, Any]:
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


def _inkling_patches(payload: ImagePayload) -> tuple[Tensor, list[int]]:
    """Return the pixels of each embedding, with margins below those of an image, and the image's grid."""
    pixels = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    values = np.full(pixels.shape, -1, np.float32)
    shown = slice(payload.original_height), slice(payload.original_width)
    values[shown] = pixels[shown]
    unit = 2 * PATCH
    rows, columns = (length // unit for length in pixels.shape[:2])
    cells = torch.from_numpy(values / 255 * 2 - 1).view(rows, unit, columns, unit, 3)
    return cells.transpose(1, 2).flatten(0, 1), [1, rows, columns]


def reference_inputs(kind: str, payloads: Sequence[ImagePayload]) -> dict[str, Any]:
    """Return the arguments of transformers' model for images."""
    if kind == "deepseek_ocr2":
        return _deepseek_inputs(payloads)
    if kind == "step3p7":
        is_cut = [payload.width == 16 for payload in payloads]
        ends = np.flatnonzero(np.logical_not(is_cut))
        whole, cuts = (
            [normalized(x) for x, y in zip(payloads, is_cut, strict=True) if y is each]
            for each in (False, True)
        )
        inputs: dict[str, Any] = {"pixel_values": torch.stack(whole)}
        if cuts:
            inputs["pixel_values_local"] = torch.stack(cuts)
        return inputs | {"num_local_patches": (np.diff(ends, prepend=-1) - 1).tolist()}
    if kind == "idefics2":
        height, width = (
            max(each) for each in zip(*((x.height, x.width) for x in payloads), strict=True)
        )
        images = torch.zeros(len(payloads), 3, height, width)
        mask = torch.zeros(len(payloads), height, width, dtype=torch.bool)
        for index, each in enumerate(payloads):
            images[index, :, : each.height, : each.width] = normalized(each)
            mask[index, : each.height, : each.width] = True
        return {"pixel_values": images[None], "pixel_attention_mask": mask[None]}
    if kind == "apertus1p5":
        # Images of several sizes are padded.
        sizes = torch.tensor([[each.height, each.width] for each in payloads])
        height, width = sizes.max(0).values.tolist()
        images = [
            torch.nn.functional.pad(
                normalized(each), (0, width - each.width, 0, height - each.height)
            )
            for each in payloads
        ]
        return {"pixel_values": torch.stack(images), "image_sizes": sizes}
    if kind == "chameleon":
        return {"pixel_values": torch.stack([*map(normalized, payloads)])}
    if kind in SQUARE_MODELS:
        names = {"pixel_values": payloads}
        if kind == "deepseek_vl_hybrid":
            names["high_res_pixel_values"] = [payload.fine for payload in payloads]
        return {name: torch.stack([*map(normalized, each)]) for name, each in names.items()}
    if kind in INKLING_MODELS:
        patches, grids = zip(*map(_inkling_patches, payloads), strict=True)
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    patches = [_patches(kind, payload) for payload in payloads]
    grids = torch.tensor([[1, each.height // PATCH, each.width // PATCH] for each in payloads])
    if kind in MINICPM_MODELS:
        return {"pixel_values": torch.cat(patches, -1)[None], "target_sizes": grids[:, 1:]}
    if kind == "nemotron_h_omni":
        return {"pixel_values": torch.cat(patches).flatten(1), "image_grid_hw": grids[:, 1:]}
    if kind == "video_llama_3":
        sizes = torch.ones(len(grids), dtype=torch.int64)
        return {
            "pixel_values": torch.cat(patches),
            "image_grid_thw": grids,
            "image_merge_sizes": sizes,
        }
    if kind != "lfm2_vl":
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
    masks = [torch.ones(len(each), dtype=torch.int64) for each in patches]
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(patches, True),
        "pixel_attention_mask": torch.nn.utils.rnn.pad_sequence(masks, True),
        "spatial_shapes": grids[:, 1:],
    }
