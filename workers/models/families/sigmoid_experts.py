"""Families with sigmoid scores of experts and a correction bias, as in DeepSeek-V3, and layers like Llama's."""

from __future__ import annotations

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.read_rope import read_rope
from ...layers.spec import LayerSpec, ModelSpec, NormNames
from .common import Family, base_spec, head_dim, sliding_layers, uniform_layers
from .experts import (
    deepseek_experts,
    first_dense,
    has_listed_experts,
    read_experts,
    unused_layers,
    with_experts,
)
from .llama import llama

_FUSED_NAMES = (
    (r"(^|\.)word_embeddings\.", r"\1embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


def _exaone_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        sliding_window=4096,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        routed_scaling_factor=2.5,
        moe_intermediate_size=1024,
    )
    rope, window = read_rope(fields, head_dim(fields)), fields.integer("sliding_window")
    pattern = fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        # The pattern has one letter per layer; "L" means a window.
        slides = sliding_layers(fields, lambda i: pattern[i % len(pattern)] == "L")
    else:
        period = fields.integer("sliding_window_pattern", 4)
        slides = sliding_layers(fields, lambda i: (i + 1) % period != 0)
    layers = tuple(LayerSpec(rope, window) if sliding else LayerSpec(None) for sliding in slides)
    return with_experts(
        llama(fields, layers=layers, qk_norm="head"),
        deepseek_experts(fields),
        has_listed_experts(fields, first_dense(fields, 1)),
        tensor_names=(
            (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            *unused_layers(fields),
        ),
    )


def _hunyuan3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        routed_scaling_factor=fields.positive("router_scaling_factor", 2.826),
        moe_intermediate_size=1536,
        num_experts=192,
    )
    rope = read_rope(fields, head_dim(fields), theta=11_158_840.0)
    return with_experts(
        llama(fields, layers=uniform_layers(fields, rope), qk_norm="head"),
        deepseek_experts(fields),
        has_listed_experts(fields, lambda i: i > 0),
        tensor_names=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (
                r"\.mlp\.(expert_bias|e_score_correction_bias)$",
                ".mlp.gate.e_score_correction_bias",
            ),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
            *unused_layers(fields),
        ),
    )


def _solar_open(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, n_shared_experts=1
    )
    rope = read_rope(fields, head_dim(fields), theta=1_000_000.0, partial=True)
    size = fields.integer("moe_intermediate_size", 1280)
    # Every layer has experts, so none has a dense MLP.
    fields = fields.with_defaults(moe_intermediate_size=size, intermediate_size=size)
    spec = llama(fields, layers=uniform_layers(fields, rope), attention_output_bias=False)
    experts = deepseek_experts(fields)
    return with_experts(spec, experts, tensor_names=unused_layers(fields))


def _sarvam_moe(fields: ConfigFields) -> ModelSpec:
    return _fused(
        fields.with_defaults(
            head_dim=64,
            num_key_value_heads=4,
            routed_scaling_factor=2.5,
            moe_intermediate_size=1024,
        ),
        theta=8_000_000.0,
    )


def _ling2(fields: ConfigFields) -> ModelSpec:
    return _fused(
        fields.with_defaults(moe_intermediate_size=512, n_group=8, topk_group=4), theta=600_000.0
    )


def _fused(fields: ConfigFields, *, theta: float) -> ModelSpec:
    """Return the spec of a model with the config fields and fused matrices of Ling 2."""
    fields = fields.with_defaults(
        attention_bias=fields.boolean("use_qkv_bias", False),
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
    )
    rope = read_rope(fields, head_dim(fields), theta=theta, partial=True)
    spec = llama(
        fields,
        layers=uniform_layers(fields, rope),
        attention_output_bias=fields.boolean("use_bias", False),
        qk_norm="head" if fields.boolean("use_qk_norm", True) else None,
    )
    return with_experts(
        spec,
        deepseek_experts(fields),
        first_dense(fields, 1),
        tensor_names=(*_FUSED_NAMES, *unused_layers(fields)),
    )


def _kolibri(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, sliding_window=513)
    size = fields.integer("moe_intermediate_size", 512)
    # Every layer has experts, so none has a dense MLP.
    fields = fields.with_values({"moe_intermediate_size": size, "intermediate_size": size})
    rope, window = read_rope(fields, head_dim(fields)), fields.integer("sliding_window")
    slides = sliding_layers(fields, lambda i: (i + 1) % 5 != 0)
    spec = base_spec(
        fields,
        tuple(LayerSpec(rope, window) if x else LayerSpec(None) for x in slides),
        norms=NormNames(
            attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"
        ),
        qk_norm="head",
    )
    experts = read_experts(
        fields,
        384,
        6,
        scoring="sigmoid",
        renormalizes=fields.boolean("norm_topk_prob", False),
        has_correction_bias=True,
        corrects_logits=True,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    return with_experts(
        spec,
        experts,
        tensor_names=(
            (r"\.moe\.router\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
            (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
        ),
    )


FAMILIES = (
    Family("BailingMoeV2ForCausalLM", "bailing_moe_v2", _ling2),
    Family("ExaoneMoEForCausalLM", "exaone_moe", _exaone_moe),
    Family("ExaoneMoeForCausalLM", "exaone_moe", _exaone_moe),
    Family("HYV3ForCausalLM", "hy_v3", _hunyuan3),
    Family("Kolibri1ForCausalLM", "kolibri1", _kolibri),
    Family("SarvamMoEForCausalLM", "sarvam_moe", _sarvam_moe),
    Family("SolarOpenForCausalLM", "solar_open", _solar_open),
)
