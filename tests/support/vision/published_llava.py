"""Files of LLaVA, Phi-4-reasoning-vision, Janus and DeepSeek-VL in the formats of their authors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

PUBLISHED_MODELS: Final = ("llava-clip", "llava-siglip", "llava_next", "llava_onevision")
"""The kinds that have a suffix "-published" in the format of LLaVA's authors."""

_ARCHITECTURES = {
    "llava_next": "LlavaMistralForCausalLM",
    "llava_onevision": "LlavaQwenForCausalLM",
}
_LLAVA_NAMES = (
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."),
    (r"^(model\.)?language_model\.lm_head\.", "lm_head."),
    (
        r"^(model\.)?vision_tower\.(vision_model\.)?",
        "model.vision_tower.vision_tower.vision_model.",
    ),
    (r"^(model\.)?multi_modal_projector\.linear_1\.", "model.mm_projector.0."),
    (r"^(model\.)?multi_modal_projector\.linear_2\.", "model.mm_projector.2."),
    (r"^image_newline$", "model.image_newline"),
)
_SAM_NAMES = (
    (r"^model\.high_res_vision_model\.vision_encoder\.", "high."),
    (r"^model\.high_res_vision_neck\.", "high.neck_hd."),
    (r"^model\.high_res_vision_proj\.conv1\.", "high.downsamples.0."),
    (r"^model\.high_res_vision_proj\.conv2\.", "high.downsamples.1."),
    (r"^model\.high_res_vision_alpha$", "high.hd_alpha_downsamples"),
    (r"^high\.patch_embed\.projection\.", "high.patch_embed.proj."),
    (r"^high\.layers\.(\d+)\.layer_norm", r"high.blocks.\1.norm"),
    (r"^high\.layers\.", "high.blocks."),
    (r"^(high\.neck\w*)\.conv1\.", r"\1.0."),
    (r"^(high\.neck\w*)\.layer_norm1\.", r"\1.1."),
    (r"^(high\.neck\w*)\.conv2\.", r"\1.2."),
    (r"^(high\.neck\w*)\.layer_norm2\.", r"\1.3."),
    (r"^high\.", "vision_model.vision_tower_high.vision_tower."),
    (r"^model\.aligner\.vision_proj\.", "aligner.low_up_proj."),
    (r"^model\.aligner\.high_res_vision_proj\.", "aligner.high_up_proj."),
    (r"^model\.aligner\.proj\.", "aligner.layers.1."),
)
_JANUS_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_model\.(vision_model\.)?", "vision_model.vision_tower."),
    (r"(vision_tower\.)embeddings\.patch_embedding\.", r"\1patch_embed.proj."),
    (r"(vision_tower\.)embeddings\.position_embedding\.weight", r"\1pos_embed"),
    (r"(vision_tower\.)encoder\.layers\.", r"\1blocks."),
    (r"(vision_tower\..*)\.layer_norm([12])\.", r"\1.norm\2."),
    (r"(vision_tower\..*)\.self_attn\.(projection_layer|out_proj)\.", r"\1.attn.proj."),
    (r"(vision_tower\.)post_layernorm\.", r"\1norm."),
    *_SAM_NAMES,
    (r"^model\.aligner\.(fc1|linear1)\.", "aligner.layers.0."),
    (r"^model\.aligner\.(hidden_layers\.0|linear2)\.", "aligner.layers.2."),
)


def as_llava(directory: Path, kind: str) -> None:
    """Give a LLaVA the format of its authors."""
    config = json.loads((directory / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    # The authors drop a layer of SigLIP, which transformers' config no longer has.
    dropped = -1 - config["vision_feature_layer"] if "siglip" in vision["model_type"] else 1
    vision["num_hidden_layers"] += 1 - dropped
    published = text | {
        "architectures": [_ARCHITECTURES.get(kind, "LlavaLlamaForCausalLM")],
        "model_type": "llava_llama",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "image_aspect_ratio": "square",
        "vision_config": vision,
    }
    if "image_grid_pinpoints" in config:
        sizes = [size[::-1] for size in config["image_grid_pinpoints"]]
        published |= {"image_grid_pinpoints": sizes, "mm_patch_merge_type": "spatial_unpad"}
        published["image_aspect_ratio"] = config.get("vision_aspect_ratio", "anyres")
    if kind == "llava_onevision":
        published["image_grid_pinpoints"] = "(1x1),...,(2x2)"
    (directory / "config.json").write_text(json.dumps(published))
    _rename(directory, _LLAVA_NAMES)


def as_deepseek(directory: Path) -> None:
    """Give a Janus or a DeepSeek-VL the format of DeepSeek, whose towers have a joint matrix for attention."""
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "image_size", "patch_size")
    sizes = {name: vision[name] for name in names}
    inner = vision.get("intermediate_size", 0) / vision["hidden_size"]
    sizes["mlp_ratio"] = vision.get("mlp_ratio", inner)
    fixed = {"model_name": "siglip_large_patch16_384", "select_feature": "same", "select_layer": -1}
    aligner: dict[str, Any] = {"depth": 2, "n_embed": config["text_config"]["hidden_size"]}
    published: dict[str, Any] = {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "vision_config": {"cls": "CLIPVisionTower", "params": sizes | fixed},
        "aligner_config": {
            "cls": "MlpProjector",
            "params": aligner | {"projector_type": "mlp_gelu"},
        },
        "language_config": config["text_config"] | {"tie_word_embeddings": True},
    }
    if config["model_type"] == "janus":
        published["gen_vision_config"] = {"cls": "VQ-16", "params": {}}
    is_hybrid = config["model_type"] == "deepseek_vl_hybrid"
    if is_hybrid:
        sam = config["high_res_vision_config"]
        names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "image_size")
        names += ("patch_size", "output_channels", "window_size", "global_attn_indexes")
        high = {name: sam[name] for name in names} | fixed | {"model_name": "sam_b_downsample"}
        high["mlp_ratio"] = sam["mlp_dim"] / sam["hidden_size"]
        params = {"concat_type": "tuple", "low_res_cfg": sizes | fixed, "high_res_cfg": high}
        published["vision_config"] = {"cls": "HybridVisionTower", "params": params}
        aligner["projector_type"] = "low_high_hybrid_split_mlp_gelu"
        published["aligner_config"]["params"] = aligner
    (directory / "config.json").write_text(json.dumps(published))
    if not (directory / "tokenizer.json").exists():
        added = {config["image_token_id"]: {"content": "<image_placeholder>"}}
        tokenizer = json.dumps({"added_tokens_decoder": added})
        (directory / "tokenizer_config.json").write_text(tokenizer)
    names = _JANUS_NAMES
    if is_hybrid:
        names += (
            (r"^vision_model\.vision_tower\.", "vision_model.vision_tower_low.vision_tower."),
        )
    _rename(directory, names)


def _rename(directory: Path, names: tuple[tuple[str, str], ...]) -> None:
    """Rename the tensors of a checkpoint, and join the tower's queries, keys and values if they become timm's."""
    stored: dict[str, torch.Tensor] = {}
    tensors: Mapping[str, torch.Tensor] = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        stored[name] = tensor
    for name in [name for name in stored if re.search(r"blocks.*\.self_attn\.q_proj\.", name)]:
        parts = [stored.pop(name.replace(".q_", f".{each}_")) for each in "qkv"]
        stored[name.replace("self_attn.q_proj", "attn.qkv")] = torch.cat(parts)
    save_file(stored, directory / "model.safetensors")
