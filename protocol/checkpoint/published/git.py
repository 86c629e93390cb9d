"""Read the config of GIT (arXiv 2205.14100), a vision tower and a decoder with the layers of BERT."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_DEFAULTS: Final = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "eos_token_id": 102,
}


def git(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a GIT. Raise CheckpointError if a field is invalid."""
    missing = {name: value for name, value in _DEFAULTS.items() if fields.get(name) is None}
    return missing | {
        "model_type": "git",
        "vision_config": dict(fields.first_section("vision_config").config),
        # No text contains the padding token, so it represents the image.
        "image_token_id": fields.integer("pad_token_id", 0, minimum=0),
        "image_mark": "<image>",
    }
