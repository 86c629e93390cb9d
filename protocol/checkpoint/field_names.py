"""Give config fields that families name differently one common name, which is Llama's."""

from __future__ import annotations

from typing import Any, Final

from .config_fields import ConfigFields

_OTHER_NAMES: Final = {
    "hidden_size": ("n_embd", "n_embed", "dim", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len", "model_max_length"),
    "rms_norm_eps": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "hidden_act": ("activation_function", "activation"),
}


_NOT_READ: Final = {
    "head_dim": {
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "openai-gpt",
        "opt",
        "persimmon",
        "stablelm",
    },
    "intermediate_size": {
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "opt",
        "xglm",
    },
    "num_key_value_heads": {"falcon"},
}
"""Fields that these model types name differently. Transformers keeps them in the configs it saves, but ignores them."""


def with_common_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields, adding Llama's name for each field that has another name in this family.

    Fields of Llama that transformers ignores in this family are dropped.

    If the output projection has fewer rows than the embedding, `vocab_size` becomes their number. A projection that is
    tied to the embedding has as many rows, whatever the config says.
    """
    if fields.get("transformers_version") is not None:
        kind = fields.get("model_type")
        fields = fields.with_values(
            {name: None for name, kinds in _NOT_READ.items() if kind in kinds}
        )
    found: dict[str, Any] = {}
    outputs = fields.optional_integer("output_vocab_size")
    if outputs is None:
        outputs = fields.optional_integer("unpadded_vocab_size")
    is_tied = fields.get("tie_word_embeddings") is True
    if outputs is not None and not is_tied and fields.get("num_unused_embeddings") is None:
        size = fields.integer("vocab_size", minimum=outputs)
        found |= {"vocab_size": outputs, "num_unused_embeddings": size - outputs}
    for name, others in _OTHER_NAMES.items():
        # A Cohere 2 MoE config without an epsilon for RMS norms describes a model with layer norms.
        is_absent = name == "rms_norm_eps" and fields.get("model_type") == "cohere2_moe"
        if fields.get(name) is None and not is_absent:
            value = next(
                (fields.get(other) for other in others if fields.get(other) is not None), None
            )
            if value is not None:
                found[name] = value
    return fields.with_values(found)


_NESTED_DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "clip_text_model": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 49_408,
        "max_position_embeddings": 77,
    },
    "siglip_text_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32_000,
        "max_position_embeddings": 64,
    },
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
"""Defaults by model type, as in transformers.

Configs of models that read images or audio omit decoder fields that have these values.
"""


_PART_SECTIONS: Final = {
    **dict.fromkeys(("colmodernvbert", "colpali", "colqwen2"), "vlm_config"),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "thinker_config"),
}
"""Model type -> the section with the whole config of the part that reads texts, images and audio."""

_OF_WHOLE: Final = ("architectures", "dtype", "torch_dtype", "transformers_version")


def fields_of_part(config: ConfigFields) -> dict[str, Any]:
    """Return the fields of the part of a model that reads, which replace those of the whole model.

    The part extends to all of the model but its last matrix (ColPali), or all but the parts that speak (Qwen-Omni). {}
    for a model without such a part.
    """
    name = _PART_SECTIONS.get(config.text("model_type", ""))
    section = None if name is None else config.section(name)
    if section is None:
        return {}
    return {name: value for name, value in section.config.items() if name not in _OF_WHOLE}


NUM_IMAGE_TOKENS: Final = 8
"""The number of tokens of Llama 3.2 Vision that are not in `vocab_size`, because the model never writes them."""

_TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config")
"""The names of the section that describes the text decoder. The first is transformers' own."""


def text_section(fields: ConfigFields) -> ConfigFields | None:
    """Return the section that describes a nested text decoder; None if the decoder is not nested.

    Qwen's Omni models nest it in the section of their thinker, the part that writes text.
    """
    fields = fields.section("thinker_config") or fields
    return next((text for name in _TEXT_SECTIONS if (text := fields.section(name))), None)


def read_text_config(fields: ConfigFields) -> ConfigFields | None:
    """Return the fields of a nested text decoder, completed with defaults; None if the decoder is not nested."""
    text = text_section(fields)
    if text is None:
        return None
    if fields.get("model_type") == "paligemma":
        # The field says that prompt tokens attend to later prompt tokens. Output tokens attend causally.
        text = text.with_values({"use_bidirectional_attention": None})
    if fields.get("model_type") == "mllama" and fields.section("vision_config") is not None:
        size = text.integer("vocab_size", 128_256) + NUM_IMAGE_TOKENS
        text = text.with_values({"vocab_size": size})
    if fields.get("model_type") == "molmo2":
        size = text.integer("vocab_size", 151_936) + text.integer("additional_vocab_size", 128)
        text = text.with_values({"vocab_size": size})
    return text.with_defaults(**_NESTED_DEFAULTS.get(text.text("model_type", ""), {}))
