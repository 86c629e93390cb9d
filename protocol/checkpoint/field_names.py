"""One name for each config field that families name differently."""

from __future__ import annotations

from typing import Final

from .config_fields import ConfigFields

_OTHER_NAMES: Final = {
    "hidden_size": ("n_embd", "n_embed", "dim", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("activation_function", "activation"),
}


def with_common_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields with those that have another family's name also under Llama's name."""
    found = {}
    for name, others in _OTHER_NAMES.items():
        # A Cohere 2 MoE without an epsilon of root-mean-square norms has layer norms.
        is_absent = name == "rms_norm_eps" and fields.get("model_type") == "cohere2_moe"
        if fields.get(name) is None and not is_absent:
            value = next(
                (fields.get(other) for other in others if fields.get(other) is not None), None
            )
            if value is not None:
                found[name] = value
    return fields.with_values(found)


_NESTED_DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
}
"""Defaults of transformers by model type.

Configs of models with images or sounds omit fields of the decoder that have them.
"""


def read_text_config(fields: ConfigFields) -> ConfigFields | None:
    """Return the fields of the text decoder, if it has a section of its own, with the defaults that it omits."""
    text = fields.section("text_config")
    if text is None:
        return None
    if fields.get("model_type") == "paligemma":
        # It says that the tokens of a prompt see each other. Those after the prompt are causal.
        text = text.with_values({"use_bidirectional_attention": None})
    return text.with_defaults(**_NESTED_DEFAULTS.get(text.text("model_type", ""), {}))
