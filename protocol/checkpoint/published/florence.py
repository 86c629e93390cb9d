"""Read the config of Florence-2 as Microsoft publishes it."""

from __future__ import annotations

from typing import Any

from ..config_fields import ConfigFields


def florence2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields that transformers has for a Florence-2; none if the config is its own."""
    vision = fields.section("vision_config")
    if vision is None or vision.get("dim_embed") is None:
        return {}
    times = vision.first_section("visual_temporal_embedding")
    places = vision.first_section("image_pos_embed")
    times.require("type", "COSINE")
    places.require("type", "learned_abs_2d")
    vision.require("image_feature_source", ["spatial_avg_pool", "temporal_avg_pool"])
    own = {
        "embed_dim": vision.get("dim_embed"),
        "max_position_embeddings": places.integer("max_pos_embeddings", 50),
        "max_temporal_embeddings": times.integer("max_temporal_embeddings", 100),
        "has_transposed_projection": True,
    }
    return {
        "text_config": {**fields.required_section("text_config").config, "model_type": "bart"},
        "vision_config": {**vision.config, **own},
        "image_mark": "<image>",
        # Prompts have no token for an image, whose embeddings precede those of the text.
        "image_token_texts": ["<image>", "<unk>"],
    }
