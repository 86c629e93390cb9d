"""Families without experts whose configs and tensors have names of their own."""

from __future__ import annotations

from typing import Any

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ....loaders.row_factors import RowFactors
from ..common import Family, uniform_layers
from ..gpt import alibi_slopes
from ..llama import llama
from ..llama_variants import glm

_CHATGLM_NAMES = (
    (r".*\.rotary_pos_emb\.inv_freq$", ""),
    (r"(^|\.)embedding\.word_embeddings\.", r"\1embed_tokens."),
    (r"(^|\.)encoder\.final_layernorm\.", r"\1norm."),
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"^(transformer\.)?output_layer\.", "lm_head."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
_QWEN_NAMES = (
    (r"(^|\.)wte\.", r"\1embed_tokens."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"(^|\.)ln_f\.", r"\1norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.w1\.", ".mlp.up_proj."),
    (r"\.mlp\.w2\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_BAICHUAN_NAMES = ((r"\.self_attn\.W_pack\.", ".self_attn.qkv_proj."),)
_BAICHUAN_7B_SIZE = 4096
_BAICHUAN2_VOCAB_SIZE = 125_696


def _chatglm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of ChatGLM 2 and 3, and of GLM-4 in its first format."""
    if fields.get("position_encoding_2d") is not None or fields.get("inner_hidden_size"):
        raise fields.error("the first ChatGLM-6B is not supported; use ChatGLM 2 or later")
    for name in ("rmsnorm", "multi_query_attention", "post_layer_norm"):
        fields.require(name, True)
    for name in ("add_bias_linear", "apply_residual_connection_post_layernorm"):
        fields.require(name, False)
    fields.require("original_rope", True)
    has_biases = fields.boolean("add_qkv_bias", False)
    theta = 10_000.0 * fields.positive("rope_ratio", 1.0)
    return glm(
        fields.with_values({"attention_bias": has_biases, "rope_theta": theta}),
        tensor_names=_CHATGLM_NAMES,
    )


def _baichuan(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Baichuan. The models with 13 billion parameters have ALiBi instead of rotations.

    Baichuan 2 divides each row of the output projection by its norm.
    """
    differences: dict[str, Any] = {}
    if fields.integer("hidden_size") != _BAICHUAN_7B_SIZE:
        differences = {"layers": uniform_layers(fields, None), "alibi_slopes": alibi_slopes(fields)}
    factors: tuple[RowFactors, ...] = ()
    is_second = fields.get("z_loss_weight") is not None
    if is_second or fields.integer("vocab_size") == _BAICHUAN2_VOCAB_SIZE:
        factors = (RowFactors(r"^lm_head\.weight$", "", normalizes=True),)
    return llama(fields, tensor_names=_BAICHUAN_NAMES, row_factors=factors, **differences)


def _first_baichuan(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first Baichuan-7B."""
    return llama(fields, tensor_names=_BAICHUAN_NAMES)


def _with_bias(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Llama whose field `bias` is about the attention's projections."""
    has_biases = fields.boolean("bias", False)
    return llama(fields, qkv_bias=has_biases, attention_output_bias=has_biases)


def _orion(fields: ConfigFields) -> ModelSpec:
    return llama(fields, norm_kind="layer", norm_bias=True)


def _qwen(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first Qwen. Attention to more tokens than in training would scale queries."""
    fields.require("no_bias", True)
    fields.require("rotary_pct", 1.0)
    width = fields.integer("intermediate_size", minimum=2)
    length = fields.integer("seq_length", fields.integer("max_position_embeddings"))
    values = {
        # The field counts the gates as well.
        "intermediate_size": width // 2,
        "max_position_embeddings": min(length, fields.integer("max_position_embeddings")),
        "rope_theta": fields.positive("rotary_emb_base", 10_000.0),
    }
    return llama(fields.with_values(values), qkv_bias=True, tensor_names=_QWEN_NAMES)


FAMILIES = (
    Family("AquilaForCausalLM", "aquila", llama),
    Family("AquilaModel", "aquila", llama),
    Family("BaiChuanForCausalLM", "baichuan", _first_baichuan),
    Family("BaichuanForCausalLM", "baichuan", _baichuan),
    Family("ChatGLMForConditionalGeneration", "chatglm", _chatglm),
    Family("ChatGLMModel", "chatglm", _chatglm),
    Family("InternLMForCausalLM", "internlm", _with_bias),
    Family("OrionForCausalLM", "orion", _orion),
    Family("PanguEmbeddedForCausalLM", "PanguEmbedded", _with_bias),
    Family("QWenLMHeadModel", "qwen", _qwen),
    Family("TeleChat3ForCausalLM", "telechat3", llama),
    Family("Telechat3ForCausalLM", "telechat3", llama),
    Family("XverseForCausalLM", "xverse", llama),
)
