"""Read the config of Kosmos-2 (arXiv 2306.14824), whose decoder's fields have names of their own."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_NAMES: Final = {
    "hidden_size": ("embed_dim", 2048),
    "intermediate_size": ("ffn_dim", 8192),
    "num_hidden_layers": ("layers", 24),
    "num_attention_heads": ("attention_heads", 32),
    "vocab_size": ("vocab_size", 65_037),
    "max_position_embeddings": ("max_position_embeddings", 2048),
}
"""Llama's name of a field -> its name here, and its default."""


def kosmos2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Kosmos-2. Raise CheckpointError if a field is invalid."""
    text = fields.required_section("text_config")
    sizes = {name: text.integer(other, size) for name, (other, size) in _NAMES.items()}
    kept = (
        "activation_function",
        "add_cross_attention",
        "bos_token_id",
        "eos_token_id",
        "layer_norm_eps",
        "scale_embedding",
        "tie_word_embeddings",
    )
    own = {name: text.get(name) for name in kept if text.get(name) is not None}
    return {
        "text_config": own | sizes | {"model_type": "kosmos-2"},
        "vision_config": dict(fields.required_section("vision_config").config),
        "tie_word_embeddings": text.boolean("tie_word_embeddings", True),
        "image_token_texts": ["<unk>"],
        "image_mark": "<image>",
    }
