"""Read the configs of Molmo 1, whose own code has the sizes of its vision tower."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields
from .renamed import nested

_TOWER: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "head_dim": 64,
    "image_size": 336,
    "patch_size": 14,
}
_NUM_ADDED: Final = 128


def molmo(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields that Molmo 2 has for the parts of a Molmo 1 (arXiv 2409.17146)."""
    fields.require_all(layer_norm_type="rms", weight_tying=False)
    if fields.get("clip_qkv") is not None:
        raise fields.wrong("clip_qkv", "null", fields.get("clip_qkv"))
    size = fields.optional_integer("embedding_size") or fields.integer("vocab_size")
    is_normed = fields.boolean("attention_layer_norm", False)
    text = {
        "vocab_size": size,
        "additional_vocab_size": _NUM_ADDED,
        "intermediate_size": fields.integer("intermediate_size") // 2,
        "head_dim": fields.integer("hidden_size") // fields.integer("num_attention_heads"),
        "attention_bias": fields.boolean("qkv_bias", True),
        "qk_norm_type": "olmo" if is_normed else "none",
        "rms_norm_eps": fields.positive("layer_norm_eps", 1e-5),
    }
    names = ("image_start_token_id", "image_end_token_id", "image_patch_id", "image_col_id")
    return {
        "model_type": "molmo",
        "text_config": nested(fields, "molmo") | text,
        "vision_config": {**_TOWER, **fields.first_section("vision_config").config},
        "low_res_image_start_token_id": size,
        # The tokens of images are the first ones beyond the vocabulary.
    } | {name: size + index for index, name in enumerate(names)}
