"""Families of bidirectional text encoders with norms before attention and MLP, such as Megatron-BERT."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ..common import Family, base_spec, head_dim, uniform_layers
from ..experts import gpt_oss
from .absolute import BERT_NAMES, POST_NORMED, positions_after_padding
from .heads import AFTER_POOLER, WITH_OWN_DENSE, encoder_families

_PRE_NORMED: Final[dict[str, Any]] = {
    name: value
    for name, value in POST_NORMED.items()
    if name not in ("norms", "norms_stream", "has_final_norm", "has_embedding_norm")
}
_MEGATRON_NAMES: Final = (
    (r"\.attention\.ln\.", ".input_layernorm."),
    (r"(\.\d+)\.ln\.", r"\1.post_attention_layernorm."),
    (r"encoder\.ln\.", "norm."),
    *BERT_NAMES,
)
_XLM_ROBERTA_XL_NAMES: Final = (
    (r"\.attention\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(\.\d+)\.LayerNorm\.", r"\1.post_attention_layernorm."),
    (r"encoder\.LayerNorm\.", "norm."),
    *BERT_NAMES,
)
_ROBERTA_PRE_NORMED_NAMES: Final = (
    (r"\.attention\.LayerNorm\.", ".input_layernorm."),
    (r"\.intermediate\.LayerNorm\.", ".post_attention_layernorm."),
    (r"^(roberta_prelayernorm\.)?LayerNorm\.", r"\1norm."),
    *BERT_NAMES,
)
_ESM_NAMES: Final = (
    (r"^(.*\.)?contact_head\..*", ""),
    (r"(^|.*\.)rotary_embeddings\.inv_freq$", ""),
    (r"embeddings\.layer_norm\.", "embed_norm."),
    (r"\.attention\.LayerNorm\.", ".input_layernorm."),
    (r"(\.\d+)\.LayerNorm\.", r"\1.post_attention_layernorm."),
    (r"encoder\.emb_layer_norm_after\.", "norm."),
    *BERT_NAMES,
)
_SHARE_OF_KEPT_TOKENS: Final = 1 - 0.15 * 0.8
"""The share of tokens that were not masked while ESM-2 was trained, by which embeddings are multiplied."""


def _pre_normed(fields: ConfigFields, **differences: Any) -> ModelSpec:
    fields.require("is_decoder", False)
    layers = differences.pop("layers", uniform_layers(fields, None))
    return base_spec(fields, layers, **_PRE_NORMED | differences)


def _megatron_bert(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu", rms_norm_eps=1e-12, max_position_embeddings=512
    )
    return _pre_normed(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        num_token_types=fields.integer("type_vocab_size", 2),
        tensor_names=_MEGATRON_NAMES,
    )


def _roberta(fields: ConfigFields, **differences: Any) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="gelu", rms_norm_eps=1e-12, type_vocab_size=2)
    fields, offset = positions_after_padding(fields)
    return _pre_normed(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=offset,
        num_token_types=fields.integer("type_vocab_size"),
        **differences,
    )


def _xlm_roberta_xl(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, type_vocab_size=1)
    return _roberta(fields, tensor_names=_XLM_ROBERTA_XL_NAMES)


def _roberta_pre_normed(fields: ConfigFields) -> ModelSpec:
    return _roberta(fields, has_embedding_norm=True, tensor_names=_ROBERTA_PRE_NORMED_NAMES)


def _esm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an ESM-1b or ESM-2 for proteins."""
    fields = fields.with_defaults(rms_norm_eps=1e-12, max_position_embeddings=1026)
    fields = fields.with_values({"hidden_act": "gelu"})
    kind = fields.choice("position_embedding_type", ("absolute", "rotary"), "absolute")
    rope, positions = None, {}
    if kind == "rotary":
        rope = read_rope(fields, head_dim(fields))
    else:
        fields, offset = positions_after_padding(fields)
        num_positions = fields.integer("max_position_embeddings")
        positions = {"num_positions": num_positions, "position_offset": offset}
    drops_tokens = fields.boolean("token_dropout", False)
    return _pre_normed(
        fields,
        layers=uniform_layers(fields, rope),
        has_embedding_norm=bool(fields.get("emb_layer_norm_before")),
        embedding_scale=_SHARE_OF_KEPT_TOKENS if drops_tokens else 1.0,
        dropped_token=fields.integer("mask_token_id", minimum=0) if drops_tokens else None,
        tensor_names=_ESM_NAMES,
        **positions,
    )


def _esmc(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an ESM Cambrian for proteins, a gated MLP and norms of queries and keys in each layer."""
    fields = fields.with_defaults(max_position_embeddings=2048)
    bias = fields.boolean("attention_bias", False)
    return _pre_normed(
        fields,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields))),
        has_gate=True,
        norm_eps=1e-5,
        final_norm_bias=False,
        qk_norm="full",
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        residual_multiplier=(36 / fields.layer_count("num_hidden_layers")) ** 0.5,
        tensor_names=((r"^(lm_head|classifier)\..*", ""),),
    )


def _privacy_filter(fields: ConfigFields) -> ModelSpec:
    """Return the spec of OpenAI's Privacy Filter, a gpt-oss whose tokens attend to their neighbors on both sides."""
    count = fields.layer_count("num_hidden_layers")
    window = 1 + fields.integer("sliding_window", 128)
    spec = gpt_oss(
        fields.with_values({"sliding_window": window, "layer_types": ["sliding_attention"] * count})
    )
    return replace(spec, is_causal=False, rope_order="interleaved", tie_word_embeddings=True)


FAMILIES: tuple[Family, ...] = (
    Family("OpenAIPrivacyFilterModel", "openai_privacy_filter", _privacy_filter),
    *encoder_families("Esm", "esm", _esm, WITH_OWN_DENSE),
    *encoder_families("Esmc", "esmc", _esmc, WITH_OWN_DENSE),
    *encoder_families("MegatronBert", "megatron-bert", _megatron_bert, AFTER_POOLER),
    *encoder_families(
        "RobertaPreLayerNorm", "roberta-prelayernorm", _roberta_pre_normed, WITH_OWN_DENSE
    ),
    *encoder_families("XLMRobertaXL", "xlm-roberta-xl", _xlm_roberta_xl, WITH_OWN_DENSE),
)
