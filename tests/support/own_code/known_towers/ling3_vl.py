"""Ling 3 with images, made of the tower of transformers' Qwen3-VL and the decoder of Ling 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.families import make_reference
from support.gguf.finish import finish
from support.mmproj.header import vision_writer
from support.own_code.known_towers.keye import KeyeModel, Rotary
from support.own_code.model import fill, qwen_patches, write
from torch import Tensor, nn
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

_PATCH, _SIZE, _SECTIONS, _AXES = 4, 48, (2, 1, 1), (0, 0, 1, 2)


class _Merger(nn.Module):
    """The norm of patches, which is all that remains of the tower's projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).view(-1, 4 * _SIZE)


def ling3_vl(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> KeyeModel:
    """Write a Ling 3 that reads images."""
    decoder = make_reference("ling3", vocab_size=vocab_size, max_position_embeddings=2048)
    # Answers have no images.
    decoder.lm_head.weight.data[image_token].zero_()
    size = decoder.config.hidden_size
    decoder.model.rotary_emb = Rotary(decoder.model.rotary_emb.inv_freq, _AXES)
    vision = {
        "depth": 3,
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_heads": 4,
        "num_position_embeddings": 36,
        "patch_size": _PATCH,
        "deepstack_visual_indexes": [],
    }
    made = qwen.Qwen3VLVisionConfig(**vision, _attn_implementation="eager")
    tower = qwen.Qwen3VLVisionModel(made)
    tower.merger = _Merger()
    projection = nn.Sequential(nn.Linear(4 * _SIZE, size), nn.GELU(), nn.Linear(size, size))
    fill(tower, projection)

    def encode(payload: ImagePayload) -> Tensor:
        found: Tensor = projection(tower(*qwen_patches(payload, _PATCH)).pooler_output)
        return found

    text: dict[str, Any] = decoder.config.to_dict()
    del text["architectures"]
    config = {
        "architectures": ["BailingMoeV3VLForConditionalGeneration"],
        "model_type": "bailing_moe_v3_vl",
        "image_token_id": image_token,
        "mrope_section": [*_SECTIONS],
        "text_config": text | {"gated_attention_proj_granularity_type": "head_wise"},
        "vision_config": vision,
    }
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": _PATCH}
    processor |= {"merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256}
    processor |= {"max_pixels": 64 * 60}
    decoder.save_pretrained(directory)
    file = directory / "model.safetensors"
    own = load_file(file)
    write(directory, config, {"model.visual.": tower, "linear_proj.": projection}, processor)
    save_file(own | load_file(file), file)
    return KeyeModel(decoder, encode, image_token)


_GGUF_NAMES = (
    (r"^linear_proj\.", "mm."),
    (r"^model\.visual\.merger\.norm\.", "mm.input_norm."),
    (r"^model\.visual\.patch_embed\.proj\.", "v.patch_embd."),
    (r"^model\.visual\.pos_embed\.", "v.position_embd."),
    (r"^model\.visual\.blocks\.", "v.blk."),
    (r"\.norm([12])\.", r".ln\1."),
    (r"\.attn\.qkv\.", ".attn_qkv."),
    (r"\.attn\.proj\.", ".attn_out."),
    (r"\.mlp\.linear_fc1\.", ".ffn_up."),
    (r"\.mlp\.linear_fc2\.", ".ffn_down."),
)


def write_ling3_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a Ling 3 in a directory as an mmproj file."""
    vision = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    numbers = {
        "image_size": 560,
        "image_min_pixels": processor["min_pixels"],
        "image_max_pixels": processor["max_pixels"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["depth"],
        "attention.head_count": vision["num_heads"],
        "spatial_merge_size": 2,
    }
    writer = vision_writer(path, "ling3vl", numbers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.startswith(("model.visual.", "linear_proj.")):
            continue
        for pattern, replacement in _GGUF_NAMES:
            name = re.sub(pattern, replacement, name)
        parts = {name: tensor}
        if name == "v.patch_embd.weight":
            first, second = tensor.unbind(2)
            parts = {name: first, f"{name}.1": second}
        for each, part in parts.items():
            writer.add_tensor(each, part.contiguous().numpy())
    finish(writer)
