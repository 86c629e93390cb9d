"""Write GLM-V, PaddleOCR-VL and a DeepSeek-OCR as files that llama.cpp's converter would make of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from support.gguf.finish import finish
from support.gguf.tokenizer import add_tokenizer
from support.mmproj.header import vision_writer

PROJECTORS = {
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm4v",
    "glm5_next": "glm5v",
    "paddleocr_vl": "paddleocr",
}
DECODERS = {
    "deepseek_ocr": "deepseek2-ocr",
    "glm4v": "glm4",
    "glm4v_moe": "glm4moe",
    "glm_ocr": "glm4",
    "glm5_next": "glm5next",
    "paddleocr_vl": "paddleocr",
}
_SUFFIXES = (".weight", ".bias")
_PADDLE = (
    (r"^(model\.)?visual\.vision_model\.", "model.vision_model."),
    (r"^(model\.)?(mlp_AR|projector)\.", "mlp_AR."),
)


def write_grid_tower(path: Path, checkpoint: Path, kind: str) -> Path:
    """Write the tower of a checkpoint of this kind to `path` and return it."""
    config = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    is_paddle = kind == "paddleocr_vl"
    layers, heads = (
        ("num_hidden_layers", "num_attention_heads") if is_paddle else ("depth", "num_heads")
    )
    numbers = {
        "image_size": config.get("image_size", 336),
        "patch_size": config["patch_size"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config[layers],
        "attention.head_count": config[heads],
    }
    if is_paddle:
        limits = {name: processor[name] for name in ("min_pixels", "max_pixels")}
        numbers |= {f"image_{name}": value for name, value in limits.items()}
        numbers["image_size"] = math.isqrt(limits["max_pixels"])
    if kind == "glm5_next":
        unit = config["patch_size"] * config["spatial_merge_size"]
        for end in ("min", "max"):
            numbers[f"image_{end}_pixels"] = processor[f"{end}_image_tokens"] * unit**2
    writer = vision_writer(
        path,
        PROJECTORS[kind],
        numbers,
        eps=1e-6 if is_paddle else config["rms_norm_eps"],
        uses_gelu=True if is_paddle else None,
        mean=processor["image_mean"],
        std=processor["image_std"],
    )
    if not is_paddle:
        writer.add_bool("clip.use_silu", True)
    if kind == "glm5_next":
        writer.add_float32("clip.vision.swiglu_clamp", config["swiglu_limit"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, config[layers])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        for pattern, replacement in _PADDLE if is_paddle else ((r"^model\.visual\.", "visual."),):
            name = re.sub(pattern, replacement, name)
        if not name.startswith(("visual.", "model.vision_model.", "mlp_AR.")):
            continue
        if "packing_position" in name or ".head." in name:
            continue
        tensor = tensor.float()
        if name == "visual.patch_embed.proj.weight":
            first, second = tensor.unbind(2)
            writer.add_tensor("v.patch_embd.weight", first.contiguous().numpy())
            writer.add_tensor("v.patch_embd.weight.1", second.contiguous().numpy())
            continue
        found = _tower_name(name) or names.get_name(name, _SUFFIXES)
        assert found is not None, name
        writer.add_tensor(found, tensor.contiguous().numpy())
    return finish(writer)


def _tower_name(name: str) -> str | None:
    """Return names that the installed table lacks."""
    if match := re.fullmatch(r"visual\.blocks\.(\d+)\.attn\.([qk])_norm\.weight", name):
        return f"v.blk.{match[1]}.attn_{match[2]}_norm.weight"
    return None


def write_grid_decoder(path: Path, model: Any, kind: str, tokenizer: Any) -> Path:
    """Write the decoder of `model` to `path` and return it."""
    config = model.config.text_config
    architecture = DECODERS[kind]
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if architecture in ("deepseek2-ocr", "glm4moe"):
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
        if architecture == "glm4moe":
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
    add_tokenizer(writer, tokenizer, config.vocab_size, "gpt-2")
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if "language_model" not in name and not name.startswith("lm_head"):
            continue
        name = name.replace("model.language_model.", "model.")
        parts = {name: tensor.float()}
        if architecture == "glm4" and re.search(r"[qk]_proj\.", name):
            heads = tensor.float().unflatten(0, (-1, head_dim // 2, 2))
            parts = {name: heads.transpose(1, 2).flatten(0, 2)}
        if ".experts." in name:
            parts = {f"{name}.weight": tensor.float()}
            if name.endswith("gate_up_proj"):
                halves = zip(("gate", "up"), tensor.float().chunk(2, 1), strict=True)
                parts = {name.replace("gate_up", x) + ".weight": half for x, half in halves}
        for each, part in parts.items():
            each = each.replace("e_score_correction_bias", "e_score_correction.bias")
            found = names.get_name(each, _SUFFIXES)
            assert found is not None, each
            writer.add_tensor(found, part.contiguous().numpy())
    return finish(writer)
