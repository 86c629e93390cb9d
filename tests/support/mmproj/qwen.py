"""Write a transformers Qwen-VL as the two GGUF files that llama.cpp's converter would make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from support.gguf.finish import finish
from support.gguf.hybrid import write_hybrid
from support.gguf.tokenizer import add_tokenizer
from support.mmproj.header import vision_writer

ARCHITECTURES = {
    "qwen2_vl": "qwen2vl",
    "qwen2_5_omni_thinker": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_asr": "qwen3vl",
    "qwen3_omni_moe_thinker": "qwen3vlmoe",
    "qwen3_vl": "qwen3vl",
}
PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
}
_OMNI_PROJECTORS = {
    "exaone4_5": "exaone4_5",
    "qwen2_5_omni_thinker": "qwen2.5vl_merger",
    "qwen3_omni_moe_thinker": "qwen3vl_merger",
}
_NAMES = (
    (r"^blocks\.", "v.blk."),
    (r"\.norm([12])\.", r".ln\1."),
    (r"\.attn\.qkv\.", ".attn_qkv."),
    (r"\.attn\.([qkv])\.", r".attn_\1."),
    (r"\.attn\.proj\.", ".attn_out."),
    (r"\.mlp\.(linear_)?fc1\.|\.mlp\.up_proj\.", ".ffn_up."),
    (r"\.mlp\.(linear_)?fc2\.|\.mlp\.down_proj\.", ".ffn_down."),
    (r"\.mlp\.gate_proj\.", ".ffn_gate."),
    (r"^patch_embed\.proj\.", "v.patch_embd."),
    (r"^pos_embed\.", "v.position_embd."),
    (r"^merger\.(ln_q|norm)\.", "v.post_ln."),
    (r"^merger\.(mlp\.0|linear_fc1)\.", "mm.0."),
    (r"^merger\.(mlp\.2|linear_fc2)\.", "mm.2."),
)


def write_decoder(
    path: Path, model: Any, tokenizer: transformers.PreTrainedTokenizerFast | None = None
) -> Path:
    """Write the decoder of `model` to `path` and return it."""
    config = model.config.text_config
    if config.model_type.startswith("qwen3_5"):
        name = "Qwen3_5Moe" if "moe" in config.model_type else "Qwen3_5"
        decoder = getattr(transformers, f"{name}ForCausalLM")(config)
        decoder.model.load_state_dict(model.model.language_model.state_dict())
        decoder.lm_head = model.lm_head
        return write_hybrid(path, decoder, tokenizer)
    architecture = ARCHITECTURES[model.config.model_type]
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if sections := config.rope_parameters.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if architecture == "qwen3vlmoe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size, "gpt-2")
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if re.search(r"visual\.|audio_tower\.|multi_modal_projector\.", name):
            continue
        name = name.replace("model.language_model.", "model.")
        parts = {name: tensor}
        if ".experts." in name:
            parts = {f"{name}.weight": tensor}
            if name.endswith("gate_up_proj"):
                halves = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
                parts = {name.replace("gate_up", x) + ".weight": half for x, half in halves}
        for each, part in parts.items():
            found = names.get_name(each, (".weight", ".bias"))
            assert found is not None, each
            writer.add_tensor(found, part.float().contiguous().numpy())
    return finish(writer)


def write_tower(path: Path, model: Any, checkpoint: Path) -> Path:
    """Write the tower of `model`, whose checkpoint has the fields of the image processor, to `path` and return it."""
    kind, config = model.config.model_type, model.config.vision_config
    size = config.embed_dim if kind == "qwen2_vl" else config.hidden_size
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    limits = processor
    if "size" in processor:
        names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        limits = {name: processor["size"][edge] for name, edge in names.items()}
    numbers = {
        "image_size": 560,
        "image_min_pixels": limits["min_pixels"],
        "image_max_pixels": limits["max_pixels"],
        "patch_size": config.patch_size,
        "embedding_length": size,
        "feed_forward_length": getattr(config, "intermediate_size", config.hidden_size),
        "block_count": config.depth,
        "attention.head_count": config.num_heads,
    }
    if kind == "exaone4_5":
        numbers["attention.head_count_kv"] = config.num_key_value_heads
    if kind.startswith(("qwen2_5", "exaone")):
        numbers["n_wa_pattern"] = config.fullatt_block_indexes[0] + 1
        numbers["window_size"] = config.window_size
    is_third = kind.startswith("qwen3")
    writer = vision_writer(
        path,
        (PROJECTORS | _OMNI_PROJECTORS)[kind],
        numbers,
        uses_gelu=True if is_third else None,
        mean=processor["image_mean"],
        std=processor["image_std"],
    )
    if "window_size" in numbers:
        writer.add_bool("clip.use_silu", True)
    layers: list[int] = []
    if is_third:
        layers = getattr(config, "deepstack_visual_indexes", [])
        writer.add_array(
            "clip.vision.is_deepstack_layers", [i in layers for i in range(config.depth)]
        )
    for name, tensor in model.model.visual.state_dict().items():
        for found, part in _stored(name, tensor.float(), layers, splits=kind.startswith("qwen2")):
            writer.add_tensor(found, part.contiguous().numpy())
    return finish(writer)


def _stored(
    name: str, tensor: torch.Tensor, layers: list[int], *, splits: bool
) -> list[tuple[str, torch.Tensor]]:
    if match := re.match(r"(?:deepstack_)?merger_list\.(\d+)\.(?:linear_)?(.+)\.(\w+)", name):
        stem = {"ln_q": "norm", "mlp.0": "fc1", "mlp.2": "fc2"}.get(match[2], match[2])
        return [(f"v.deepstack.{layers[int(match[1])]}.{stem}.{match[3]}", tensor)]
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    if name == "v.patch_embd.weight":
        first, second = tensor.unbind(2)
        return [(name, first), (f"{name}.1", second)]
    if ".attn_qkv." in name and splits:
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return [(name.replace("qkv", part), values) for part, values in parts]
    return [(name, tensor)]
