"""Read the config of GLM-Edge-V, whose decoder's fields are those of the whole config."""

from __future__ import annotations

from typing import Any

from ..config_fields import ConfigFields
from .renamed import nested


def glm_edge(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a GLM-Edge-V; none for a GLM that reads only texts."""
    if fields.section("vision_config") is None:
        return {}
    return {
        "architectures": ["GlmEdgeForConditionalGeneration"],
        "model_type": "glm_edge_v",
        "text_config": nested(fields, "glm"),
        "image_token_id": fields.get("boi_token_id"),
        "image_parts": ["model.vision", "vision"],
    }
