"""Read the configs of Moondream 2 and 3, whose own code has the sizes of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..config_fields import ConfigFields

MARK: Final = "<|endoftext|><image>"
"""The text that stands for an image, which is encoded together with the first token of a prompt."""

_TEXT: Final = {
    "hidden_size": ("dim", 2048),
    "intermediate_size": ("ff_dim", 8192),
    "num_hidden_layers": ("n_layers", 24),
    "vocab_size": ("vocab_size", 51_200),
    "num_attention_heads": ("n_heads", 32),
    "num_key_value_heads": ("n_kv_heads", 32),
}
_VISION: Final = {
    "hidden_size": ("enc_dim", 1152),
    "intermediate_size": ("enc_ff_dim", 4304),
    "num_hidden_layers": ("enc_n_layers", 27),
    "num_attention_heads": ("enc_n_heads", 16),
    "patch_size": ("enc_patch_size", 14),
    "image_size": ("crop_size", 378),
    "projector_hidden_size": ("proj_inner_dim", 8192),
    "max_crops": ("max_crops", 12),
    "overlap_margin": ("overlap_margin", 4),
}
_EXPERTS: Final = {
    "first_k_dense_replace": ("start_layer", 4),
    "num_local_experts": ("n_experts", 64),
    "num_experts_per_tok": ("n_experts_per_tok", 8),
    "moe_intermediate_size": ("expert_inner_dim", 1024),
}


def moondream(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Moondream, whose config has a section with those that differ from its code."""
    own = fields.first_section("config")
    is_third = architecture != "HfMoondream" or fields.text("model_type", "") == "moondream3"
    text, vision = own.first_section("text"), own.first_section("vision")
    if text.get("group_size") is not None:
        raise text.wrong(
            "group_size", "null: quantized weights are not supported", text.get("group_size")
        )
    decoder = _renamed(text, _TEXT) | {
        "model_type": "moondream",
        "max_position_embeddings": text.get("max_context", 4096 if is_third else 2048),
        "rope_theta": text.get("rope_theta", 1_500_000.0 if is_third else 10_000.0),
        "tie_word_embeddings": False,
        "has_token_scales": is_third,
    }
    if is_third:
        decoder |= _renamed(text.first_section("moe"), _EXPERTS)
    tokens = own.first_section("tokenizer")
    answer = tokens.integer("answer_id", 3, minimum=0)
    end = tokens.integer("eos_id", 0, minimum=0)
    if is_third:
        # The token that ends a question is never written.
        decoder["silent_tokens"] = [answer, answer + 1]
    return {
        "architectures": ["HfMoondream"],
        "model_type": "moondream",
        "text_config": decoder,
        "vision_config": _renamed(vision, _VISION),
        "bos_token_id": tokens.integer("bos_id", 0, minimum=0),
        "eos_token_id": end,
        "image_mark": MARK,
        "image_parts": ["model.vision", "vision", "model.region", "region"],
        "image_token_texts": ["<image>", "<|endoftext|>"],
        "image_processor": {},
    }


def _renamed(section: ConfigFields, names: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return the fields of a section by their usual names, with the values of the model's own code as defaults."""
    return {name: section.get(other, value) for name, (other, value) in names.items()}
