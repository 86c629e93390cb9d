"""Read the config of BLIP (arXiv 2201.12086), a vision tower and a BERT that writes what it shows."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_DEFAULTS: Final = {
    "vocab_size": 30_524,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


def blip(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a BLIP that writes captions. Raise CheckpointError if a field is invalid."""
    text = fields.required_section("text_config").with_defaults(**_DEFAULTS)
    vision = fields.required_section("vision_config").with_defaults(hidden_size=768)
    size = vision.integer("hidden_size")
    text.require("encoder_hidden_size", size, ", as in vision_config", default=768)
    return {
        "text_config": {**text.config, "model_type": "blip"},
        "vision_config": dict(vision.config),
        "tie_word_embeddings": text.boolean("tie_word_embeddings", True),
        "eos_token_id": text.get("sep_token_id", 102),
        # The token at which each text begins also represents the image, which cross attention reads.
        "image_token_id": text.get("bos_token_id", 30_522),
        "image_mark": "<image>",
        "image_parts": ["vision_model"],
    }
