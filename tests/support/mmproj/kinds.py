"""Write towers of checkpoints as the mmproj files that llama.cpp's converter would make of them, by tables of names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer
from torch import Tensor

_LAYER = r"model\.vision_tower\.(?:encoder\.)?layers\.(\d+)\."
_DOWNSAMPLER = r"(?:model\.)?vision_model\.vit_downsampler"
_SIGLIP = (
    (_LAYER + r"layer_norm", r"v.blk.\1.ln"),
    (_LAYER + r"self_attn\.([qkv])_proj", r"v.blk.\1.attn_\2"),
    (_LAYER + r"self_attn\.out_proj", r"v.blk.\1.attn_out"),
    (_LAYER + r"mlp\.fc1", r"v.blk.\1.ffn_up"),
    (_LAYER + r"mlp\.fc2", r"v.blk.\1.ffn_down"),
    (r"model\.vision_tower\.embeddings\.patch_embedding", "v.patch_embd"),
    (r"model\.vision_tower\.embeddings\.position_embedding", "v.position_embd"),
    (r"model\.vision_tower\.post_layernorm", "v.post_ln"),
)
_PROJECTION = r"projections\.(\d+)\."
_ATTENTION = _PROJECTION + r"qformer\.encoder\.layer\.0\.(self|cross)\."
_BLOCK = r"vision_encoder\.blocks\.(\d+)\."
_RADIO = r"vision_model\.radio_model\.model\."
_READER = r"model\.qwen2_model\.model\.model\.layers\.(\d+)\."
_RULES = {
    "deepseek_ocr2": (
        (_READER + r"input_layernorm", r"v.blk.\1.ln1"),
        (_READER + r"post_attention_layernorm", r"v.blk.\1.ln2"),
        (_READER + r"self_attn\.([qkv])_proj", r"v.blk.\1.attn_\2"),
        (_READER + r"self_attn\.o_proj", r"v.blk.\1.attn_out"),
        (_READER + r"mlp\.(gate|up|down)_proj", r"v.blk.\1.ffn_\2"),
        (r"model\.qwen2_model\.model\.model\.norm", "v.post_ln"),
        (r"model\.qwen2_model\.query", "v.resample_query"),
    ),
    "dots3_note": (
        (_BLOCK + r"norm_", r"v.blk.\1.ln"),
        (_BLOCK + r"attn\.qkv", r"v.blk.\1.attn_qkv"),
        (_BLOCK + r"attn\.proj", r"v.blk.\1.attn_out"),
        (_BLOCK + r"attn\.([qk])_norm", r"v.blk.\1.attn_\2_norm"),
        (_BLOCK + r"mlp\.gate_weight", r"v.blk.\1.ffn_gate_inp.weight"),
        (_BLOCK + r"mlp\.router_bias", r"v.blk.\1.exp_probs_b.weight"),
        (_BLOCK + r"mlp\.experts\.fc1", r"v.blk.\1.ffn_gate_exps"),
        (_BLOCK + r"mlp\.experts\.fc2", r"v.blk.\1.ffn_down_exps"),
        (_BLOCK + r"mlp\.experts\.fc3", r"v.blk.\1.ffn_up_exps"),
        (_BLOCK + r"mlp\.fc1", r"v.blk.\1.ffn_gate"),
        (_BLOCK + r"mlp\.fc2", r"v.blk.\1.ffn_down"),
        (_BLOCK + r"mlp\.fc3", r"v.blk.\1.ffn_up"),
        (r"vision_encoder\.patch_embed\.proj", "v.patch_embd"),
        (r"vision_encoder\.patch_embed\.norm", "v.pre_ln"),
        (r"vision_encoder\.post_trunk_norm", "mm.post_norm"),
        (r"vision_encoder\.adapter\.ln_q", "mm.input_norm"),
        (r"vision_encoder\.adapter\.mlp", "mm"),
    ),
    "gemma3n": (
        (r"model\.vision_tower\.timm_model\.blocks\.", "v.blk."),
        (r"model\.vision_tower\.timm_model\.", "v."),
    ),
    "granite4_vision": (
        (
            _PROJECTION + r"qformer\.encoder\.layer\.0\.output_query\.dense",
            r"v.proj_blk.\1.ffn_down",
        ),
        (
            _PROJECTION + r"qformer\.encoder\.layer\.0\.output_query\.LayerNorm",
            r"v.proj_blk.\1.ffn_norm",
        ),
        (
            _PROJECTION + r"qformer\.encoder\.layer\.0\.intermediate_query\.dense",
            r"v.proj_blk.\1.ffn_up",
        ),
        (_ATTENTION + r"attention\.([qkv])\w+", r"v.proj_blk.\1.\2_attn_\3"),
        (_ATTENTION + r"output\.dense", r"v.proj_blk.\1.\2_attn_out"),
        (_ATTENTION + r"output\.LayerNorm", r"v.proj_blk.\1.\2_attn_norm"),
        (_PROJECTION + "image_positions", r"v.proj_blk.\1.img_pos"),
        (_PROJECTION + "out_linear", r"v.proj_blk.\1.linear"),
        (_PROJECTION + "(norm|query)", r"v.proj_blk.\1.\2"),
        (_PROJECTION + r"qformer\.layernorm", r"v.proj_blk.\1.post_norm"),
        (r"model\.image_newline", "v.image_newline"),
        *_SIGLIP,
    ),
    "hunyuan_vl": (),
    "janus": (
        (r"model\.aligner\.fc1\.", "mm.0."),
        (r"model\.aligner\.hidden_layers\.0\.", "mm.1."),
    ),
    "minicpmv4_6": (
        *_SIGLIP,
        (r"model\.vision_tower\.vit_merger\.layer_norm1", "v.vit_merger.ln1"),
        (r"model\.vision_tower\.vit_merger\.pre_norm", "v.vit_merger.ds_ln"),
        (r"model\.vision_tower\.vit_merger\.linear_1", "v.vit_merger.ds_ffn_up"),
        (r"model\.vision_tower\.vit_merger\.linear_2", "v.vit_merger.ds_ffn_down"),
        (r"model\.vision_tower\.vit_merger\.self_attn\.(.+?)(_proj)?\.", r"v.vit_merger.attn_\1."),
        (r"model\.merger\.mlp\.0\.pre_norm", "mm.input_norm"),
        (r"model\.merger\.mlp\.0\.linear_1", "mm.up"),
        (r"model\.merger\.mlp\.0\.linear_2", "mm.down"),
    ),
    "minimax_m3_vl": ((r"patch_merge_mlp\.linear_", "mm.merger.fc"),),
    "muse_glimmer": (
        (_LAYER + "norm", r"v.blk.\1.ln"),
        (_LAYER + r"attn\.([qkv])_proj", r"v.blk.\1.attn_\2"),
        (_LAYER + r"attn\.proj", r"v.blk.\1.attn_out"),
        (_LAYER + r"mlp\.fc1", r"v.blk.\1.ffn_up"),
        (_LAYER + r"mlp\.fc2", r"v.blk.\1.ffn_down"),
        (r"model\.vision_tower\.ln_(pre|post)", r"v.\1_ln"),
        (r"model\.vision_tower\.patch_embedder\.patch_embedding", "v.patch_embd"),
        (r"model\.vision_adapter\.fc1", "mm.0"),
        (r"model\.vision_adapter\.fc2", "mm.1"),
        (r"model\.vision_projection", "mm.2"),
    ),
    "nemotron_h_omni": (
        (r"mlp1\.", "mm.model.mlp."),
        (_RADIO + r"patch_generator\.cls_token\.token", "v.class_embd"),
        (_RADIO + r"patch_generator\.embedder", "v.patch_embd"),
        (_RADIO + r"patch_generator\.pos_embed", "v.position_embd.weight"),
        (_RADIO + r"blocks\.(\d+)\.attn\.qkv", r"v.blk.\1.attn_qkv"),
        (_RADIO + r"blocks\.(\d+)\.attn\.proj", r"v.blk.\1.attn_out"),
        (_RADIO + r"blocks\.(\d+)\.mlp\.fc1", r"v.blk.\1.ffn_up"),
        (_RADIO + r"blocks\.(\d+)\.mlp\.fc2", r"v.blk.\1.ffn_down"),
        (_RADIO + r"blocks\.(\d+)\.norm", r"v.blk.\1.ln"),
    ),
    "step3p7": (
        (_DOWNSAMPLER + "1", "mm.0"),
        (_DOWNSAMPLER + "2", "mm.1"),
        (r"(?:model\.)?vit_large_projector", "mm.model.fc"),
        (r".*positional_embedding$", "v.position_embd.weight"),
        (r".*resblocks\.(\d+)\.ls_([12])\.gamma", r"v.blk.\1.ls\2.weight"),
        (r".*resblocks\.(\d+)\.attn\.in_proj_", r"v.blk.\1.attn_qkv."),
    ),
}
"""Patterns of names in checkpoints and their replacements. The installed table has the others."""

PROJECTORS = {
    "deepseek_ocr2": "deepseekocr2",
    "dots3_note": "dots3note_v",
    "gemma3n": "gemma3nv",
    "granite4_vision": "granite4_vision",
    "hunyuan_vl": "hunyuanvl",
    "janus": "janus_pro",
    "minicpmv4_6": "minicpmv4_6",
    "minimax_m3_vl": "minimax_m3",
    "muse_glimmer": "muse-glimmer",
    "nemotron_h_omni": "nemotron_v2_vl",
    "step3p7": "step3vl",
}
_OTHER_PARTS = ("language_model", "lm_head", "model.embed_tokens")
_LEFT_OUT = (
    "model.layers.",
    "model.norm.",
    "model.vqmodel",
    "model.generation",
    "model.vision_tower.head",
    "sound_encoder.",
    "sound_projection.",
    "audio_adapter.",
    "audio_encoder.",
)
_OF_OTHERS = ("video_embedder", ".layer_scale1", ".layer_scale2", "summary_idxs")


def write_mmproj_of_kind(path: Path, checkpoint: Path, kind: str) -> Path:
    """Write the tower of a checkpoint of this kind to `path` and return it."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config["vision_config"]
    if kind == "deepseek_ocr2":
        vision = vision["encoder_config"]
    heads = vision.get("num_attention_heads", 8)
    mean, std = ([0.0] * 3, [1.0] * 3) if kind == "gemma3n" else ([0.5] * 3, [0.5] * 3)
    writer = vision_writer(
        path,
        PROJECTORS[kind],
        _numbers(kind, config, checkpoint),
        eps=vision.get("layer_norm_eps", vision.get("rms_norm_eps", 1e-6)),
        uses_gelu=kind != "step3p7",
        mean=mean,
        std=std,
    )
    if kind == "granite4_vision":
        writer.add_array("clip.vision.feature_layer", [2, 1, 0, 1, 1, 1])
        writer.add_array("clip.vision.projector.spatial_offsets", GRANITE_OFFSETS)
        sides = [x for y, x in config["image_grid_pinpoints"] for x in (x, y)]
        writer.add_array("clip.vision.image_grid_pinpoints", sides)
    if kind == "minicpmv4_6":
        writer.add_array("clip.vision.wa_layer_indexes", [config["insert_layer_id"]])
    if kind == "dots3_note":
        writer.add_uint32("clip.vision.expert_used_count", vision["num_experts_per_tok"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    for name, tensor in _with_stacked_experts(load_file(checkpoint / "model.safetensors")):
        if kind == "granite4_vision":
            name = _granite_name(name)
        if name.startswith(_LEFT_OUT) or any(part in name for part in (*_OTHER_PARTS, *_OF_OTHERS)):
            continue
        found = next(
            (re.sub(old, new, name) for old, new in _RULES[kind] if re.match(old, name)), None
        )
        if name.endswith(("pos_embed", "rel_pos_h", "rel_pos_w")) and kind == "deepseek_ocr2":
            name += ".weight"
        found = found or names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        for each, part in _stored(kind, found, tensor.float(), heads).items():
            writer.add_tensor(each, part.contiguous().numpy())
    return finish(writer)


def _with_stacked_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors, with one for the matrices of all experts of a layer."""
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if name.startswith("vision_encoder.") and ".experts." in name:
            stacks.setdefault(re.sub(r"(\.experts)\.\d+", r"\1", name), []).append(tensor)
        else:
            yield name, tensor
    for name, experts in stacks.items():
        yield name, torch.stack(experts)


def _numbers(kind: str, config: dict[str, Any], checkpoint: Path) -> dict[str, int]:
    vision = config["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    if kind == "deepseek_ocr2":
        sam, vision = vision["sam_config"], vision["encoder_config"]
        return {
            "embedding_length": vision["hidden_size"],
            "feed_forward_length": vision["intermediate_size"],
            "block_count": vision["num_hidden_layers"],
            "attention.head_count": vision["num_attention_heads"],
            "attention.head_count_kv": vision["num_key_value_heads"],
            "sam.block_count": sam["num_hidden_layers"],
            "sam.embedding_length": sam["hidden_size"],
            "sam.head_count": sam["num_attention_heads"],
        }
    if kind == "dots3_note":
        limits = {f"image_{name}": processor[name] for name in ("min_pixels", "max_pixels")}
        return tower_sizes(vision) | limits | {"image_size": 0, "spatial_merge_size": 2}
    if kind == "gemma3n":
        return {"image_size": processor["size"]["height"], "block_count": 128}
    numbers = {
        "image_size": vision.get("image_size", 32),
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision.get("intermediate_size", 72),
        "block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "attention.head_count": vision["num_attention_heads"],
    }
    if kind == "hunyuan_vl":
        limits = {f"image_{name}": processor[name] for name in ("min_pixels", "max_pixels")}
        return numbers | limits | {"spatial_merge_size": 2}
    if kind == "minicpmv4_6":
        return numbers | {"image_size": processor["scale_resolution"], "projector.scale_factor": 4}
    if kind == "nemotron_h_omni":
        sizes = {"image_size": vision["max_img_size"], "projector.scale_factor": 2}
        return numbers | sizes
    if kind == "granite4_vision":
        return numbers | {"projector.query_side": 2, "projector.window_side": 4}
    return numbers


GRANITE_OFFSETS = [-1, 0, -1, 1, 2, 3]
"""The place in a square at which each of Granite's projections reads patches, or -1."""


def _granite_name(name: str) -> str:
    """Return a name with the number that a projection has among all, in place of that among those of its kind."""
    match = re.match(r"model\.(layerwise|spatial)_projectors\.(\d+)\.", name)
    if match is None:
        return name
    is_plain = match[1] == "layerwise"
    places = [i for i, offset in enumerate(GRANITE_OFFSETS) if (offset < 0) == is_plain]
    name = f"projections.{places[int(match[2])]}.{name[match.end() :]}"
    return name.replace(".crossattention.", ".cross.").replace(
        "layer.0.attention.", "layer.0.self."
    )


def _stored(kind: str, name: str, tensor: Tensor, num_heads: int) -> dict[str, Tensor]:
    """Return the tensors of the file that have the content of one of the checkpoint."""
    is_query_or_key = re.search(r"blk\.\d+\.attn_[qk]\.", name) is not None
    if kind == "hunyuan_vl" and name == "v.position_embd.weight":
        tensor = tensor.squeeze()[1:]
    if kind == "nemotron_h_omni" and name == "v.patch_embd.weight":
        tensor = tensor.view(len(tensor), 3, 4, 4)
    if kind == "muse_glimmer" and name == "v.patch_embd.weight":
        tensor = tensor.view(len(tensor), 2, 3, 4, 4).sum(1)
    elif kind == "muse_glimmer" and is_query_or_key:
        tensor = tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    elif kind == "minimax_m3_vl" and name == "v.patch_embd.weight":
        first, second = tensor.unbind(2)
        return {name: first, f"{name}.1": second}
    elif kind == "minimax_m3_vl" and is_query_or_key:
        # Of 20 elements of a head, 18 are rotated: three by each half of each axis.
        heads = tensor.unflatten(0, (num_heads, 20))
        rotated = heads[:, :18].unflatten(1, (2, 3, 3)).transpose(1, 2).flatten(1, 3)
        tensor = torch.cat((rotated, heads[:, 18:]), 1).flatten(0, 1)
    elif name.endswith(("conv_stem.conv.bias", "layer_scale.gamma")):
        tensor = tensor[None, :, None, None]
    return {name: tensor}
