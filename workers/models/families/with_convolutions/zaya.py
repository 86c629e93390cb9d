"""ZAYA1: attention whose queries, keys and values are convolved, and routers that pass on what they compute."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.recurrent_config import read_head_convolutions
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope_of_layer_type
from ....layers.spec import ModelSpec
from ....layers.specs.experts import RouterSpec
from ..common import Family, base_spec
from ..experts import read_experts, with_experts

_NAMES = (
    (r"\.self_attn\.qkv_proj\.v_proj_current\.", ".self_attn.v_proj."),
    (r"\.self_attn\.qkv_proj\.", ".self_attn."),
    (r"\.self_attn\.qk_norm\.temp$", ".self_attn.key_scale"),
    (r"\.mlp\.gate\.balancing_biases$", ".mlp.gate.e_score_correction_bias"),
    (r"\.post_(attention|mlp)_residual_scale\.", r".\1_scale."),
    (r"(^|\.)input_hidden_states_(scale|bias)$", r"\1embed_\2"),
)
_THETAS = {"hybrid": 5_000_000.0, "hybrid_sliding": 10_000.0}


def _zaya(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        moe_intermediate_size=2048,
    )
    fields.require_all(attention_bias=False, num_experts_per_tok=1)
    # All layers have experts, and no other MLP.
    fields = fields.with_values({"intermediate_size": fields.integer("moe_intermediate_size")})
    count, size = fields.layer_count("num_hidden_layers"), fields.integer("head_dim")
    kinds = fields.per_layer("layer_types", count) or ["hybrid"] * count
    for kind in kinds:
        if kind not in _THETAS:
            raise fields.wrong("layer_types", "hybrid or hybrid_sliding for each layer", kind)
    convolutions = read_head_convolutions(fields)
    layers = {
        kind: LayerSpec(
            read_rope_of_layer_type(fields, kind, size, theta=theta, partial=True),
            window=fields.integer("sliding_window") if kind == "hybrid_sliding" else None,
            recurrent=convolutions,
        )
        for kind, theta in _THETAS.items()
        if kind in kinds
    }
    experts = read_experts(
        fields,
        (16, 1),
        renormalizes=False,
        has_correction_bias=True,
        num_identities=1,
        skips_identities=True,
        router=RouterSpec(fields.integer("router_hidden_size", 256), fields.number("rms_norm_eps")),
    )
    spec = base_spec(
        fields,
        tuple(layers[kind] for kind in kinds),
        qk_norm="scaled",
        has_residual_scales=True,
        head_bias=fields.boolean("lm_head_bias", False),
        tensor_names=_NAMES,
    )
    return with_experts(spec, experts)


FAMILIES = (Family("ZayaForCausalLM", "zaya", _zaya),)
