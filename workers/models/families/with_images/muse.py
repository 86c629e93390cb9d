"""The Muse families, which have the norms of Gemma and gated attention."""

from __future__ import annotations

from typing import Any

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, attention_biases, base_spec, head_dim, sliding_layers
from ..experts import has_listed_experts, read_experts, with_experts

_NORMS = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_UNIT_NORMS = ("embed_norm", "q_norm", "k_norm")
_GLIMMER_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "rms_norm_eps": 1e-5,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}


_SPARK_DEFAULTS = _GLIMMER_DEFAULTS | {
    "hidden_size": 8192,
    "intermediate_size": 16_384,
    "num_hidden_layers": 62,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.1767766952966369,
    "rope_theta": 500_000.0,
}


def _glimmer(fields: ConfigFields) -> ModelSpec:
    return _muse(fields.with_defaults(**_GLIMMER_DEFAULTS), _UNIT_NORMS)


def _spark(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(**_SPARK_DEFAULTS)
    spec = _muse(
        fields,
        (*_UNIT_NORMS, "post_attention_layernorm"),
        input_scaled_norms=("post_feedforward_layernorm",),
        norms_heads=True,
        # Transformers never ties them, whatever the config says.
        tie_word_embeddings=False,
        residual_temperature=fields.positive("residual_gate_temperature", 0.3),
    )
    experts = read_experts(
        fields,
        (256, 8, 4096),
        scoring="sigmoid",
        has_correction_bias=True,
        scale=fields.positive("routed_scaling_factor", 1.0),
        latent_size=fields.integer("moe_hidden_size", 4096),
        has_latent_norms=True,
        logit_multiplier=fields.positive("output_multiplier"),
    )
    return with_experts(
        spec, experts, has_listed_experts(fields, lambda i: True), tensor_names=_SPARK_NAMES
    )


def _muse(fields: ConfigFields, unit_norms: tuple[str, ...], **differences: Any) -> ModelSpec:
    return base_spec(
        fields,
        _layers(fields),
        norms=_NORMS,
        norm_weight_offset=1.0,
        final_norm_offset=0.0,
        output_norm_eps=fields.positive("post_norm_eps"),
        unit_norms=unit_norms,
        has_embedding_norm=True,
        qk_norm="head",
        attention_scale=fields.positive("qk_scale_factor") * head_dim(fields) ** -0.5,
        gates_attention=True,
        has_gate_projection=True,
        logits_divisor=1 / fields.positive("output_multiplier"),
        final_softcap=fields.positive("final_logit_softcapping"),
        **attention_biases(fields),
        **differences,
    )


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Return layers with windows, and layers without. Those whose `layer_rope_theta` is 0 have no rotary embedding."""
    num_layers = fields.layer_count("num_hidden_layers")
    is_usual = [(num_layers - 1 - i) % 4 == 0 for i in range(num_layers)]
    slides = sliding_layers(fields, lambda i: not is_usual[i])
    thetas = fields.per_layer("layer_rope_theta", num_layers)
    rotates = [not each for each in is_usual] if thetas is None else [bool(x) for x in thetas]
    rope, window = read_rope(fields, head_dim(fields)), fields.integer("sliding_window")
    return tuple(
        LayerSpec(rope if has_rope else None, window if sliding else None)
        for sliding, has_rope in zip(slides, rotates, strict=True)
    )


_SPARK_NAMES = (
    (r"\.(post_\w+)_residual_gate\.gate$", r".\1_layernorm.residual_gate"),
    (r"\.mlp\.pre_expert_proj\.", ".mlp.to_latent."),
    (r"\.mlp\.post_expert_proj\.", ".mlp.from_latent."),
    (r"\.mlp\.pre_expert_norm\.", ".mlp.latent_norm."),
    (r"\.mlp\.experts\.post_expert_norm\.", ".mlp.expert_norm."),
)
FAMILIES = (
    Family("MuseGlimmerForConditionalGeneration", "muse_glimmer", _glimmer),
    Family("MuseSparkForConditionalGeneration", "muse_spark", _spark),
)
