"""Read the config of Nemotron Parse, whose tower is named like one of timm's and whose decoder is an mBART's."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_TOWERS: Final = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
"""The hidden size and the numbers of layers and heads of the towers that configs name."""


def nemotron_parse(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Nemotron Parse."""
    encoder, decoder = fields.required_section("encoder"), fields.required_section("decoder")
    args = encoder.first_section("args")
    name = args.text("model", "vit_huge_patch16_224")
    if name not in _TOWERS:
        raise args.wrong("model", f"one of {', '.join(_TOWERS)}", name)
    size, num_layers, num_heads = _TOWERS[name]
    sides = fields.integers("image_size")
    if len(sides) != 2:
        raise fields.wrong("image_size", "a height and a width", sides)
    is_tied = fields.boolean("tie_word_embeddings", decoder.boolean("tie_word_embeddings", False))
    return {
        "model_type": "nemotron_parse",
        "text_config": {
            **decoder.config,
            "model_type": "nemotron_parse",
            "hidden_size": decoder.integer("d_model", 1024),
            "num_hidden_layers": decoder.integer("decoder_layers", 10),
            "num_attention_heads": decoder.integer("decoder_attention_heads", 16),
            "intermediate_size": decoder.integer("decoder_ffn_dim", 4096),
            "tie_word_embeddings": is_tied,
        },
        "vision_config": {
            "hidden_size": args.integer("hidden_size", size),
            "num_hidden_layers": args.integer("num_hidden_layers", num_layers),
            "num_attention_heads": args.integer("num_attention_heads", num_heads),
            "patch_size": encoder.integer("patch_size", 16),
            "max_img_size": args.integer("cpe_max_size", 2048),
            "summary": _summary(args),
            "page_size": sides,
        },
        "eos_token_id": decoder.get("eos_token_id", 2),
        "image_mark": "<image>",
        # The token at which a prompt begins also represents the page, which cross attention reads.
        "image_token_texts": ["</s>"],
        "image_parts": ["encoder"],
        "image_processor": {},
    }


def _summary(args: ConfigFields) -> list[int]:
    """Return the numbers of the learned rows whose outputs describe a whole page."""
    teachers = args.get("teachers", [])
    if not isinstance(teachers, list) or not all(isinstance(each, dict) for each in teachers):
        raise args.wrong("teachers", "a list of sections", teachers)
    if not teachers or not args.boolean("cls_token_per_teacher", False):
        return [0]
    return [i for i, teacher in enumerate(teachers) if teacher.get("use_summary", True)]
